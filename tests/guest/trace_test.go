// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// strace is the command that traces a program's writes and syncs into a file.
func strace(file string) []string {
	return []string{"strace", "-f", "--seccomp-bpf", "-y", "-s", "64", "-e", "signal=none", "-o", file,
		"-e", "trace=write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,sync_file_range,io_submit", "--"}
}

// traced is a write to a file or a sync of it, at the moment that matters: a write is made when it is begun, since the
// guest hears of it at the end at the earliest, and a sync when it has succeeded.
type traced struct {
	file    string
	sync    bool
	offset  int64 // of a write
	durable bool  // by a flag of its own
}

type trace []traced

var (
	traceCall    = regexp.MustCompile(`^(\d+) +(\w+)\((.*)$`)
	traceResumed = regexp.MustCompile(`^(\d+) +<\.\.\. (\w+) resumed>(.*)$`)
	traceSync    = regexp.MustCompile(`^\d+<(.*)>`)
	traceWrite   = regexp.MustCompile(`^\d+<(.*?)>, .*, (\d+)(?:\) += | <unfinished)`)
	traceWrite2  = regexp.MustCompile(`^\d+<(.*?)>, .*, (\d+), ([A-Z_|]+|0)(?:\) += | <unfinished)`)
	traceIOCB    = regexp.MustCompile(`\{[^{}]*aio_lio_opcode=(IOCB_CMD_P?WRITEV?|IOCB_CMD_F\w*SYNC)[^{}]*(?:\{[^{}]*\}[^{}]*)*\}`)
	traceFile    = regexp.MustCompile(`aio_fildes=\d+<(.*?)>`)
	traceOffset  = regexp.MustCompile(`aio_offset=(\d+)`)
)

func readTrace(t *testing.T, file string) trace {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var all trace
	unfinished := make(map[string]string) // by thread: the arguments of its sync
	for _, line := range strings.Split(string(text), "\n") {
		if m := traceResumed.FindStringSubmatch(line); m != nil {
			if strings.HasSuffix(m[2], "sync") && strings.Contains(m[3], " = 0") {
				all = append(all, syncOf(unfinished[m[1]]))
			}
			continue
		}
		m := traceCall.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		switch call, args := m[2], m[3]; {
		case call == "io_submit":
			all = append(all, submitted(args)...)
		case strings.HasSuffix(call, "sync") && strings.Contains(args, "<unfinished"):
			unfinished[m[1]] = args
		case strings.HasSuffix(call, "sync") && strings.Contains(args, ") = 0"):
			all = append(all, syncOf(args))
		case strings.HasPrefix(call, "pwrite"):
			all = append(all, written(call, args)...)
		}
	}
	return all
}

func written(call, args string) []traced {
	pattern := traceWrite
	if call == "pwritev2" {
		pattern = traceWrite2
	}
	m := pattern.FindStringSubmatch(args)
	if m == nil {
		return nil
	}
	offset, _ := strconv.ParseInt(m[2], 10, 64) // digits
	return []traced{{file: m[1], offset: offset, durable: call == "pwritev2" && strings.Contains(m[3], "SYNC")}}
}

func syncOf(args string) traced {
	e := traced{sync: true}
	if m := traceSync.FindStringSubmatch(args); m != nil {
		e.file = m[1]
	}
	return e
}

// submitted takes the requests of an io_submit apart. A sync among them counts when it is submitted.
func submitted(args string) (all []traced) {
	for _, m := range traceIOCB.FindAllStringSubmatch(args, -1) {
		e := traced{sync: strings.HasSuffix(m[1], "SYNC"), durable: strings.Contains(m[0], "RWF_DSYNC") || strings.Contains(m[0], "RWF_SYNC")}
		if f := traceFile.FindStringSubmatch(m[0]); f != nil {
			e.file = f[1]
		}
		if o := traceOffset.FindStringSubmatch(m[0]); o != nil {
			e.offset, _ = strconv.ParseInt(o[1], 10, 64) // digits
		}
		all = append(all, e)
	}
	return all
}

// durable counts the writes of one kind, which begin at place, and those of them that were durable before the next
// write of that kind, by a flag or by a sync.
func (tr trace) durable(file string, place int64) (made, durable int) {
	pending := false
	for _, e := range tr {
		switch {
		case e.file != file:
		case e.sync && pending:
			durable++
			pending = false
		case !e.sync && e.offset >= place && e.offset < place+1<<20:
			made++
			pending = !e.durable
			if e.durable {
				durable++
			}
		}
	}
	return made, durable
}

func (tr trace) syncs(file string) (n int) {
	for _, e := range tr {
		if e.file == file && e.sync {
			n++
		}
	}
	return n
}
