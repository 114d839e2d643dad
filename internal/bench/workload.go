// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"strings"
	"time"
)

// Workload says what a run does, in fio's words.
type Workload struct {
	RW        string        // read, write, rw, randread, randwrite, randrw, trim, randtrim
	BS        int           // bytes a request, a multiple of 512
	IODepth   int           // requests outstanding in each job
	NumJobs   int           // jobs, each a virtqueue and a thread
	Runtime   time.Duration // measured
	RampTime  time.Duration // before, not measured
	Size      int64         // bytes used from the start of the disk; 0: all
	RWMixRead int           // percent of reads in rw and randrw
	Fsync     int           // a flush after so many writes; 0: none
	Verify    bool
	Poll      bool // busy-poll the used ring and ask for no calls
	QueueSize int  // descriptors in a queue; 0: 256, or what the depth needs
	NoEvent   bool // do not negotiate the event index
	Batch     int  // requests placed for each kick; 0: whatever is free
	Seed      uint64
	Hang      time.Duration // without a completion for so long, the run has failed
	Connect   time.Duration // how long to wait for the server, at its socket and for its first answer
}

// Defaults fills what is zero, as fio would.
func (w *Workload) Defaults() {
	set := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	if w.RW == "" {
		w.RW = "randread"
	}
	set(&w.BS, 4096)
	set(&w.IODepth, 1)
	set(&w.NumJobs, 1)
	set(&w.RWMixRead, 50)
	if w.QueueSize == 0 {
		w.QueueSize = 256
		for w.QueueSize < w.IODepth {
			w.QueueSize *= 2
		}
	}
	if w.Runtime == 0 {
		w.Runtime = 5 * time.Second
	}
	if w.Seed == 0 {
		w.Seed = 1
	}
	if w.Connect == 0 {
		w.Connect = 30 * time.Second
	}
	if w.Hang == 0 {
		w.Hang = 30 * time.Second
	}
}

var kinds = map[string]struct{ random, reads, writes, trims bool }{
	"read":      {reads: true},
	"write":     {writes: true},
	"rw":        {reads: true, writes: true},
	"readwrite": {reads: true, writes: true},
	"randread":  {random: true, reads: true},
	"randwrite": {random: true, writes: true},
	"randrw":    {random: true, reads: true, writes: true},
	"trim":      {trims: true},
	"randtrim":  {random: true, trims: true},
}

// Check says what is wrong with the workload, after Defaults.
func (w *Workload) Check() error {
	k, ok := kinds[w.RW]
	switch {
	case !ok:
		return fmt.Errorf("unknown workload --rw=%s (want read, write, rw, randread, randwrite, randrw, trim or randtrim)", w.RW)
	case w.BS < 512 || w.BS%512 != 0 || w.BS > 32<<20:
		return fmt.Errorf("--bs=%d (want a multiple of 512 up to 32M)", w.BS)
	case w.IODepth < 1 || w.IODepth > 1024:
		return fmt.Errorf("--iodepth=%d (want 1 to 1024)", w.IODepth)
	case w.NumJobs < 1 || w.NumJobs > 256:
		return fmt.Errorf("--numjobs=%d (want 1 to 256: each is a virtqueue)", w.NumJobs)
	case w.QueueSize&(w.QueueSize-1) != 0 || w.QueueSize > 1024 || w.QueueSize < w.IODepth:
		return fmt.Errorf("--queue-size=%d (want a power of two from the depth to 1024)", w.QueueSize)
	case w.RWMixRead < 0 || w.RWMixRead > 100:
		return fmt.Errorf("--rwmixread=%d (want 0 to 100)", w.RWMixRead)
	case w.Verify && k.trims:
		return fmt.Errorf("--verify with --rw=%s: what is read after a trim is not defined", w.RW)
	case w.Runtime < 0 || w.RampTime < 0 || w.Size < 0 || w.Fsync < 0 || w.Batch < 0:
		return fmt.Errorf("negative times, sizes and counts make no workload")
	}
	return nil
}

// String is the workload as one would type it.
func (w *Workload) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rw=%s bs=%d iodepth=%d numjobs=%d", w.RW, w.BS, w.IODepth, w.NumJobs)
	if w.Verify {
		b.WriteString(" verify")
	}
	if w.Poll {
		b.WriteString(" poll")
	}
	return b.String()
}
