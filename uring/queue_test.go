// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

func TestFullSubmissionQueueGivesNil(t *testing.T) {
	r := newTestRing(t, 4, nil)
	for i := range r.SQEntries() {
		if r.SQSpace() != r.SQEntries()-i || r.SQPending() != i {
			t.Errorf("after %d entries: space %d, pending %d", i, r.SQSpace(), r.SQPending())
		}
		sqe(t, r).PrepNop()
	}
	if r.GetSQE() != nil || r.SQSpace() != 0 {
		t.Fatal("an entry from a full queue")
	}
	if n, err := r.Submit(); n != 4 || err != nil {
		t.Fatalf("submitted %d, %v", n, err)
	}
	if r.GetSQE() == nil {
		t.Fatal("no entry after the submission")
	}
}

func TestReapCopiesNoMoreThanFits(t *testing.T) {
	r := newTestRing(t, 8, nil)
	for i := range uint64(5) {
		s := sqe(t, r)
		s.PrepNop()
		s.UserData = i
	}
	if _, err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	var buf [3]CQE
	next := uint64(0)
	for _, want := range []int{3, 2, 0} {
		if n := r.Reap(buf[:]); n != want {
			t.Fatalf("reaped %d, want %d", n, want)
		}
		for _, c := range buf[:want] {
			if c.UserData != next {
				t.Errorf("completion of %d, want %d", c.UserData, next)
			}
			next++
		}
	}
	if r.Reap(nil) != 0 {
		t.Error("reaped into nothing")
	}
}

func TestCompletionsThatDoNotFitAreKeptInOrder(t *testing.T) {
	for _, o := range []*Options{{CQEntries: 4}, {CQEntries: 4, SingleIssuer: true, DeferTaskrun: true}} {
		t.Run(o.flags().String(), func(t *testing.T) {
			r := newTestRing(t, 4, o)
			if r.Features()&FeatNoDrop == 0 {
				missing(t, "NODROP", "5.5")
			}
			const total = 400
			var buf [3]CQE
			submitted, reaped := uint64(0), uint64(0)
			reap := func() {
				for n := r.Reap(buf[:]); n > 0; n = r.Reap(buf[:]) {
					for _, c := range buf[:n] {
						if c.UserData != reaped {
							t.Fatalf("completion of %d, want %d", c.UserData, reaped)
						}
						reaped++
					}
				}
			}
			for submitted < total {
				if s := r.GetSQE(); s != nil {
					s.PrepNop()
					s.UserData = submitted
					submitted++
					continue
				}
				_, err := r.Submit()
				switch {
				case errors.Is(err, syscall.EBUSY): // older kernels take nothing while completions wait
					reap()
					if err := r.FlushOverflow(); err != nil {
						t.Fatal(err)
					}
				case err != nil:
					t.Fatal(err)
				}
			}
			for r.SQPending() > 0 {
				if _, err := r.SubmitAndGetEvents(); err != nil && !errors.Is(err, syscall.EBUSY) {
					t.Fatal(err)
				}
				reap()
			}
			overflowed := r.CQOverflowed()
			if overflowed && !r.NeedsEnter() {
				t.Error("overflow does not ask for a call")
			}
			for reaped < total {
				before := reaped
				if err := r.FlushOverflow(); err != nil {
					t.Fatal(err)
				}
				if reap(); reaped == before {
					t.Fatalf("%d of %d completions, no more come", reaped, total)
				}
			}
			quiet(t, r)
			if r.CQOverflowed() || r.CQLost() != 0 {
				t.Errorf("overflowed %t, lost %d at the end", r.CQOverflowed(), r.CQLost())
			}
		})
	}
}

func TestOverflowIsFetchedByAWait(t *testing.T) {
	r := newTestRing(t, 4, &Options{CQEntries: 4})
	for i := 0; i < 16; i++ {
		if s := r.GetSQE(); s != nil {
			s.PrepNop()
		}
		_, _ = r.Submit() // EBUSY on older kernels once 4 completions are over
	}
	if !r.CQOverflowed() {
		t.Fatal("16 completions in 4 places, and no overflow")
	}
	for got := 0; got < 8; got++ {
		if r.PeekCQE() == nil {
			if _, err := r.SubmitAndWait(1, patience); err != nil {
				t.Fatal(err)
			}
		}
		r.Advance(1)
	}
}

func TestWaits(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		if n, err := r.SubmitAndWait(1, time.Millisecond); n != 0 || err != syscall.ETIME {
			t.Errorf("wait for nothing: %d, %v", n, err)
		}
		if n, err := r.SubmitAndWait(1, 0); n != 0 || err != nil {
			t.Errorf("wait of no time: %d, %v", n, err)
		}
		if n, err := r.SubmitAndWait(0, -1); n != 0 || err != nil {
			t.Errorf("wait for no completion: %d, %v", n, err)
		}
		for range 3 {
			sqe(t, r).PrepNop()
		}
		if n, err := r.SubmitAndWait(3, -1); n != 3 || err != nil {
			t.Errorf("three requests: %d, %v", n, err)
		}
		if n, err := r.SubmitAndWait(3, -1); n != 0 || err != nil || r.CQReady() != 3 {
			t.Errorf("wait for what is there: %d, %v, %d ready", n, err, r.CQReady())
		}
		r.Advance(3)
		pr, pw := pipe(t)
		s := sqe(t, r)
		s.PrepPollAdd(pr, POLLIN, 0)
		s.UserData = 1
		if n, err := r.SubmitAndWait(1, time.Millisecond); n != 1 || err != nil || r.CQReady() != 0 {
			t.Errorf("request that takes its time: %d, %v, %d ready", n, err, r.CQReady())
		}
		if n, err := r.SubmitAndWait(1, time.Millisecond); n != 0 || err != syscall.ETIME {
			t.Errorf("and again: %d, %v", n, err)
		}
		put(t, pw, "x")
		one(t, r, 1)
	})
}

func TestPutOffWorkAsksForACall(t *testing.T) {
	r := newTestRing(t, 4, &Options{SingleIssuer: true, DeferTaskrun: true, TaskrunFlag: true})
	pr, pw := pipe(t)
	s := sqe(t, r)
	s.PrepPollAdd(pr, POLLIN, 0)
	s.UserData = 1
	if _, err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	if r.NeedsEnter() {
		t.Fatal("asks for a call with nothing to tell")
	}
	put(t, pw, "x")
	if !r.NeedsEnter() || r.CQReady() != 0 {
		t.Fatalf("asks for a call: %t, %d ready", r.NeedsEnter(), r.CQReady())
	}
	if n, err := r.Submit(); n != 0 || err != nil || r.CQReady() != 1 {
		t.Errorf("%d, %v, %d ready", n, err, r.CQReady())
	}
}

// signalThread sends SIGURG, which the Go runtime takes for a preemption that is over, to a thread until stop is closed.
func signalThread(tid int, stop <-chan struct{}, done chan<- struct{}) {
	defer close(done)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
			_, _, _ = syscall.RawSyscall(syscall.SYS_TGKILL, uintptr(os.Getpid()), uintptr(tid), uintptr(syscall.SIGURG))
		}
	}
}

func TestSignalCutsAWaitShort(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		stop, done := make(chan struct{}), make(chan struct{})
		go signalThread(sys.Gettid(), stop, done)
		defer func() {
			close(stop)
			<-done
		}()
		for _, limit := range []time.Duration{-1, patience} {
			if n, err := r.SubmitAndWait(1, limit); n != 0 || err != syscall.EINTR {
				t.Errorf("limit %v: %d, %v, want EINTR", limit, n, err)
			}
		}
		pr, pw := pipe(t)
		s := sqe(t, r)
		s.PrepPollAdd(pr, POLLIN, 0)
		s.UserData = 1
		if n, err := r.SubmitAndWait(1, -1); n != 1 || err != nil || r.CQReady() != 0 {
			t.Errorf("signal after a submission: %d, %v, %d ready; want the submission told, the signal not", n, err, r.CQReady())
		}
		if _, err := r.SubmitAndWait(1, -1); err != syscall.EINTR {
			t.Errorf("the wait after it: %v", err)
		}
		put(t, pw, "x")
		one(t, r, 1)
	})
}

func TestPreemptionDisturbsNoRequest(t *testing.T) {
	r := newTestRing(t, 4, nil)
	stop, done := make(chan struct{}), make(chan struct{})
	go signalThread(sys.Gettid(), stop, done)
	var ended atomic.Bool
	defer ended.Store(true)
	for range 4 {
		go func() { // hogs that the runtime preempts
			for !ended.Load() {
			}
		}()
	}
	fd, _ := tempFile(t, testText)
	b := make([]byte, 5)
	for i := range 200 {
		must(t, r, fmt.Sprint("read ", i), 5, func(s *SQE) { s.PrepRead(fd, b, 4) })
	}
	close(stop)
	<-done
}

// taking is an EnterFunc that lets the kernel take at most n entries a call.
func taking(n uint32) EnterFunc {
	return func(fd int, toSubmit, minComplete, flags uint32, arg unsafe.Pointer, argSize uintptr) (int, error) {
		if toSubmit > n {
			toSubmit, minComplete = n, 0 // it does not wait after part of a batch
		}
		return KernelEnter(fd, toSubmit, minComplete, flags, arg, argSize)
	}
}

// failing is an EnterFunc whose call number nth, and all after it if forever, give errno.
func failing(nth int, forever *bool, errno syscall.Errno) EnterFunc {
	calls := 0
	return func(fd int, toSubmit, minComplete, flags uint32, arg unsafe.Pointer, argSize uintptr) (int, error) {
		if calls++; calls == nth || calls > nth && *forever {
			return 0, errno
		}
		return KernelEnter(fd, toSubmit, minComplete, flags, arg, argSize)
	}
}

func TestWhatTheKernelDidNotTakeGoesOutNext(t *testing.T) {
	for _, o := range []Options{{}, {NoSQArray: true}, {SingleIssuer: true, DeferTaskrun: true}} {
		for _, atOnce := range []uint32{1, 3, 7} {
			t.Run(fmt.Sprintf("%v/%d", o.flags(), atOnce), func(t *testing.T) {
				o.Enter = taking(atOnce)
				r := newTestRing(t, 8, &o)
				for next, reaped := uint64(0), uint64(0); reaped < 100; {
					for ; ; next++ { // refill behind the rest of the last batch
						s := r.GetSQE()
						if s == nil {
							break
						}
						s.PrepNop()
						s.UserData = next
					}
					before := r.SQPending()
					n, err := r.SubmitAndWait(1, patience)
					if err != nil || n != int(min(before, atOnce)) || r.SQPending() != before-uint32(n) {
						t.Fatalf("%d of %d taken, %d pending, %v", n, before, r.SQPending(), err)
					}
					for c := r.PeekCQE(); c != nil; c = r.PeekCQE() {
						if c.UserData != reaped {
							t.Fatalf("completion of %d, want %d", c.UserData, reaped)
						}
						reaped++
						r.Advance(1)
					}
				}
			})
		}
	}
}

func TestNoErrorLosesOrRepeatsAnEntry(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EINTR, syscall.EAGAIN, syscall.EBUSY, syscall.ETIME, syscall.ENOMEM} {
		for nth := 1; nth <= 12; nth++ {
			for _, forever := range []bool{false, true} {
				t.Run(fmt.Sprintf("%v/%d/%t", errno, nth, forever), func(t *testing.T) {
					fail := forever
					r := newTestRing(t, 4, &Options{Enter: failing(nth, &fail, errno)})
					const total = 40
					seen, next, errs := 0, uint64(0), 0
					for seen < total {
						for next < total {
							s := r.GetSQE()
							if s == nil {
								break
							}
							s.PrepNop()
							s.UserData = next
							next++
						}
						before := r.SQPending()
						if n, err := r.SubmitAndWait(1, patience); err != nil {
							if errs++; err != errno || n != 0 || r.SQPending() != before {
								t.Fatalf("%d, %v, pending %d then %d", n, err, before, r.SQPending())
							}
							if errs == 5 {
								fail = false // it lets go in the end
							}
						}
						for c := r.PeekCQE(); c != nil; c = r.PeekCQE() {
							if c.UserData != uint64(seen) {
								t.Fatalf("completion of %d, want %d", c.UserData, seen)
							}
							seen++
							r.Advance(1)
						}
					}
					if want := map[bool]int{false: 1, true: 5}[forever]; nth <= 10 && errs != want {
						t.Errorf("%d errors, want %d", errs, want)
					}
				})
			}
		}
	}
}

func TestRefusedEntryEndsABatchUnlessAllAreAskedFor(t *testing.T) {
	for _, all := range []bool{false, true} {
		t.Run(fmt.Sprintf("submit_all=%t", all), func(t *testing.T) {
			r := newTestRing(t, 8, &Options{SubmitAll: all})
			for i := range uint64(5) {
				s := sqe(t, r)
				if s.PrepNop(); i == 2 {
					s.Opcode = 255
				}
				s.UserData = i
			}
			want := map[bool]int{false: 3, true: 5}[all]
			if n, err := r.Submit(); n != want || err != nil {
				t.Errorf("took %d, %v; want %d", n, err, want)
			}
			m := byUserData(t, wait(t, r, 5)) // the rest goes out by itself
			for i := range uint64(5) {
				wantRes(t, m, i, map[bool]int32{false: 0, true: -int32(syscall.EINVAL)}[i == 2])
			}
		})
	}
}

func TestNothingToSayMakesNoCall(t *testing.T) {
	calls := 0
	r := newTestRing(t, 4, &Options{Enter: func(fd int, n, min, flags uint32, arg unsafe.Pointer, size uintptr) (int, error) {
		calls++
		return KernelEnter(fd, n, min, flags, arg, size)
	}})
	for _, c := range []struct {
		name string
		f    func() (int, error)
		want int
	}{
		{"submit of nothing", r.Submit, 0},
		{"getting events", r.SubmitAndGetEvents, 1},
		{"submit of two and wait", func() (int, error) {
			sqe(t, r).PrepNop()
			sqe(t, r).PrepNop()
			return r.SubmitAndWait(2, patience)
		}, 1},
		{"wait for what is there", func() (int, error) { return r.SubmitAndWait(2, patience) }, 0},
	} {
		calls = 0
		if _, err := c.f(); err != nil || calls != c.want {
			t.Errorf("%s: %d calls, want %d (%v)", c.name, calls, c.want, err)
		}
	}
}

func TestRequestsAllocateNothing(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		fd, _ := tempFile(t, testText)
		b := make([]byte, 8)
		v := []IOVec{IOVecOf(b)}
		ts := &Timespec{Nsec: 1}
		var cqes [8]CQE
		cycle := func() {
			r.GetSQE().PrepRead(fd, b, 0)
			r.GetSQE().PrepReadv(fd, v, 0, 0)
			r.GetSQE().PrepTimeout(ts, 0, 0)
			for done := 0; done < 3; {
				_, _ = r.SubmitAndWait(1, patience)
				n := r.Reap(cqes[:])
				for i := range cqes[:n] {
					_ = cqes[i].Err()
				}
				done += n
			}
			_, _ = r.SubmitAndWait(1, time.Microsecond) // ETIME
			_, _ = r.SubmitAndGetEvents()
		}
		if n := testing.AllocsPerRun(100, cycle); n != 0 {
			t.Errorf("%v allocations a cycle", n)
		}
	})
}

func TestWhatPrepIsGivenIsNotOnTheStack(t *testing.T) {
	var s SQE
	for name, f := range map[string]func(){
		"buffer":   func() { var b [8]byte; s.PrepRead(0, b[:], 0) },
		"timespec": func() { ts := Timespec{Sec: 1}; s.PrepTimeout(&ts, 0, 0) },
	} {
		if n := testing.AllocsPerRun(10, f); n != 1 {
			t.Errorf("%s: %v allocations, want 1: a stack may move under the request", name, n)
		}
	}
	vector := func() { var b [8]byte; v := [1]IOVec{IOVecOf(b[:])}; s.PrepReadv(0, v[:], 0, 0) }
	if n := testing.AllocsPerRun(10, vector); n != 2 {
		t.Errorf("vector: %v allocations, want 2", n)
	}
	runtime.KeepAlive(&s)
}
