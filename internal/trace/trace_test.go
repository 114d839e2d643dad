// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/json"
	"testing"
)

// file is what a reader of the format sees.
type file struct {
	Events []struct {
		Phase    string         `json:"ph"`
		PID, TID int            `json:"-"`
		Pid      int            `json:"pid"`
		Tid      int            `json:"tid"`
		Name     string         `json:"name"`
		TS       float64        `json:"ts"`
		Dur      *float64       `json:"dur"`
		Args     map[string]any `json:"args"`
	} `json:"traceEvents"`
}

func parse(t *testing.T, b []byte) file {
	t.Helper()
	var f file
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatalf("%v in\n%s", err, b)
	}
	return f
}

// fill adds n requests of four a batch, of which one went to an engine.
func fill(b *Buffer, q *Queue, n int) {
	for i := range n {
		at := int64(1000 * (i / 4))
		e := b.Add()
		*e = Event{Queue: q, Found: at, Popped: at + 100, Completed: at + 100, Published: at + 500, Offset: int64(i) * 4096, Length: 4096}
		if i%4 == 0 {
			e.Queued, e.Submitted, e.Completed, e.Kind = at+150, at+200, at+400, KindWrite
		}
		if i%4 == 3 {
			b.Called(q, 4, at+600)
		}
	}
}

// Goal: a reader can nest every slice. Method: slices of one thread either contain each other or do not touch.
func TestTheTraceCanBeRead(t *testing.T) {
	one, two := &Queue{Disk: `a "quoted" disk`, Export: "/s", Loop: "loop 0"}, &Queue{Disk: "b", Export: "/t", Index: 3, Loop: "loop 1"}
	x, y := NewBuffer(64), NewBuffer(16)
	fill(x, one, 40)
	fill(y, two, 40)
	var out bytes.Buffer
	if err := Write(&out, []*Buffer{x, y}); err != nil {
		t.Fatal(err)
	}
	f := parse(t, out.Bytes())
	type track struct{ pid, tid int }
	type span struct{ from, to float64 }
	open := make(map[track][]span)
	count := make(map[string]int)
	for _, e := range f.Events {
		count[e.Phase+" "+e.Name]++
		if e.Phase != "X" {
			continue
		}
		if e.Dur == nil || *e.Dur < 0 {
			t.Fatalf("slice %q lasts %v", e.Name, e.Dur)
		}
		at := track{e.Pid, e.Tid}
		const tick = 0.0005 // microseconds; moments have nanoseconds
		s := span{e.TS, e.TS + *e.Dur}
		for len(open[at]) > 0 && open[at][len(open[at])-1].to <= s.from+tick {
			open[at] = open[at][:len(open[at])-1]
		}
		if n := len(open[at]); n > 0 && open[at][n-1].to < s.to-tick {
			t.Fatalf("slice %q from %v to %v of track %v overlaps the end of one that ends at %v", e.Name, s.from, s.to, at, open[at][n-1].to)
		}
		open[at] = append(open[at], s)
	}
	for name, want := range map[string]int{
		"M process_name": 2, "X read": 30 + 12, "X write": 10 + 4, "X ring": 56, "X kernel": 14, "X queued": 14, "X graph": 56, "X publish": 56,
		"X notify": 56, "X take 4": 14, "X publish 4": 14,
	} {
		if count[name] != want {
			t.Errorf("%d of %q, want %d", count[name], name, want)
		}
	}
	if y.Added() != 40 || len(y.Events(nil)) != 16 || y.Events(nil)[0].Offset != 24*4096 {
		t.Errorf("of %d requests %d are kept, from offset %d", y.Added(), len(y.Events(nil)), y.Events(nil)[0].Offset)
	}
}

func TestAnEmptyTraceIsATrace(t *testing.T) {
	var out bytes.Buffer
	if err := Write(&out, []*Buffer{NewBuffer(0)}); err != nil {
		t.Fatal(err)
	}
	if f := parse(t, out.Bytes()); len(f.Events) != 0 {
		t.Errorf("%d events of nothing", len(f.Events))
	}
}

func TestAddingAllocatesNothing(t *testing.T) {
	b, q := NewBuffer(8), &Queue{}
	if n := testing.AllocsPerRun(100, func() { *b.Add() = Event{Queue: q}; b.Called(q, 2, 5) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
