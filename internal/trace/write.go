// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
)

// Write writes what the buffers keep as one JSON object. Each queue is a process of the trace: its thread "batches" shows
// each batch as it was taken from the ring and as it was published, and below it each request is a row of nested slices,
// one for each stage. Rows are used again as soon as they are free, so that there are as many as requests overlapped.
func Write(out io.Writer, buffers []*Buffer) error {
	var events []Event
	for _, b := range buffers {
		events = b.Events(events)
	}
	slices.SortStableFunc(events, func(a, b Event) int { return cmp.Compare(a.Found, b.Found) })
	w := &writer{out: bufio.NewWriterSize(out, 1<<16)}
	w.printf(`{"displayTimeUnit":"ns","otherData":{"requests":%d},"traceEvents":[`, len(events))
	for pid, queue := range byQueue(events) {
		w.queue(pid+1, queue)
	}
	w.printf("\n]}\n")
	if w.err != nil {
		return w.err
	}
	return w.out.Flush()
}

// byQueue sorts the requests of each queue out, the queues in the order of their first request.
func byQueue(events []Event) [][]*Event {
	var list [][]*Event
	at := make(map[*Queue]int)
	for i := range events {
		e := &events[i]
		n, ok := at[e.Queue]
		if !ok {
			n = len(list)
			at[e.Queue] = n
			list = append(list, nil)
		}
		list[n] = append(list[n], e)
	}
	return list
}

type writer struct {
	out   *bufio.Writer
	err   error
	comma bool
}

func (w *writer) printf(format string, args ...any) {
	if w.err == nil {
		_, w.err = fmt.Fprintf(w.out, format, args...)
	}
}

// event writes one, args being JSON of its own or empty.
func (w *writer) event(pid, tid int, phase, name string, at int64, rest string) {
	sep := "\n"
	if w.comma {
		sep = ",\n"
	}
	w.comma = true
	w.printf(`%s{"ph":"%s","pid":%d,"tid":%d,"name":"%s","ts":%d.%03d%s}`, sep, phase, pid, tid, name, at/1000, at%1000, rest)
}

// tidBatches is the thread of the batches; the rows of requests follow it.
const tidBatches = 1

func (w *writer) queue(pid int, events []*Event) {
	q := events[0].Queue
	w.name(pid, 0, "process_name", fmt.Sprintf("%s queue %d", q.Disk, q.Index))
	w.name(pid, 0, "process_labels", fmt.Sprintf("%s on %s", q.Export, q.Loop))
	w.name(pid, tidBatches, "thread_name", "batches")
	w.batches(pid, events)
	var rows []int64 // until when each is in use
	for _, e := range events {
		row := slices.IndexFunc(rows, func(end int64) bool { return end <= e.Found })
		if row < 0 {
			row = len(rows)
			rows = append(rows, 0)
			w.name(pid, tidBatches+1+row, "thread_name", fmt.Sprintf("request %d", row))
		}
		rows[row] = e.end()
		w.request(pid, tidBatches+1+row, e)
	}
}

// end is when everything of the request was over.
func (e *Event) end() int64 { return max(e.Published, e.Called, e.Found+1) }

func (w *writer) name(pid, tid int, what, name string) {
	key := "name"
	if what == "process_labels" {
		key = "labels"
	}
	b, err := json.Marshal(map[string]string{key: name})
	if err != nil {
		w.err = err
		return
	}
	w.event(pid, tid, "M", what, 0, `,"args":`+string(b))
}

// slice writes one complete slice.
func (w *writer) slice(pid, tid int, name string, from, to int64, args string) {
	if args != "" {
		args = `,"args":{` + args + `}`
	}
	length := max(to-from, 0)
	w.event(pid, tid, "X", name, from, fmt.Sprintf(`,"dur":%d.%03d%s`, length/1000, length%1000, args))
}

func (w *writer) request(pid, tid int, e *Event) {
	w.slice(pid, tid, e.Kind.String(), e.Found, e.end(), fmt.Sprintf(`"offset":%d,"length":%d,"status":%d`, e.Offset, e.Length, e.Status))
	w.slice(pid, tid, "ring", e.Found, e.Popped, "")
	if e.Submitted != 0 {
		w.slice(pid, tid, "graph", e.Popped, e.Queued, "")
		w.slice(pid, tid, "queued", e.Queued, e.Submitted, "")
		w.slice(pid, tid, "kernel", e.Submitted, e.Completed, "")
	} else {
		w.slice(pid, tid, "graph", e.Popped, e.Completed, "")
	}
	w.slice(pid, tid, "publish", e.Completed, e.Published, "")
	if e.Called != 0 {
		w.slice(pid, tid, "notify", e.Published, e.Called, "")
	}
}

// batches writes a slice for all requests that were popped together, and one for all that were published together. Both
// are work of the one loop, and do not overlap.
func (w *writer) batches(pid int, events []*Event) {
	type batch struct {
		name     string
		from, to int64
		n        int
	}
	taken, published := make(map[int64]*batch), make(map[int64]*batch)
	add := func(in map[int64]*batch, name string, from, to int64) {
		b := in[to]
		if b == nil {
			b = &batch{name: name, from: from, to: to}
			in[to] = b
		}
		b.n++
		b.from = min(b.from, from)
	}
	for _, e := range events {
		add(taken, "take", e.Found, e.Popped)
		add(published, "publish", e.Completed, e.Published)
	}
	var all []*batch
	for _, in := range []map[int64]*batch{taken, published} {
		for _, b := range in {
			all = append(all, b)
		}
	}
	slices.SortFunc(all, func(a, b *batch) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(b.to, a.to), cmp.Compare(a.name, b.name))
	})
	for _, b := range all {
		w.slice(pid, tidBatches, fmt.Sprintf("%s %d", b.name, b.n), b.from, b.to, fmt.Sprintf(`"requests":%d`, b.n))
	}
}
