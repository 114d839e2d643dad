// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"io"
	"syscall"
	"testing"
)

// TestOutcomes feeds the kernel's answers to one request, one after the other, and says what each means: go on, or done
// with that error.
func TestOutcomes(t *testing.T) {
	const goOn = syscall.Errno(0xffff) // in the place of an error: not done
	const fua, zeroEOF = FlagFUA, FlagZeroEOF
	type answers = []int64
	for _, c := range []struct {
		name   string
		op     Op
		flags  Flags
		direct bool
		res    answers
		want   []error // of each answer
	}{
		{"read whole", OpRead, 0, false, answers{4096}, []error{nil}},
		{"read in pieces", OpRead, 0, false, answers{1, 4094, 1}, []error{goOn, goOn, nil}},
		{"read beyond the end", OpRead, 0, false, answers{0}, []error{endOfFile}},
		{"read to the end", OpRead, 0, false, answers{100, 0}, []error{goOn, endOfFile}},
		{"read beyond the end, zeros", OpRead, zeroEOF, false, answers{0}, []error{nil}},
		{"read to the end, zeros", OpRead, zeroEOF, false, answers{100, 0}, []error{goOn, nil}},
		{"direct read ends in a sector", OpRead, zeroEOF, true, answers{100}, []error{nil}},
		{"direct read ends in a sector, no zeros", OpRead, 0, true, answers{100}, []error{endOfFile}},
		{"direct read ends at a sector", OpRead, zeroEOF, true, answers{512, 0}, []error{goOn, nil}},
		{"read error", OpRead, zeroEOF, false, answers{-5}, []error{syscall.EIO}},
		{"read error after a piece", OpRead, 0, false, answers{512, -5}, []error{goOn, syscall.EIO}},
		{"read interrupted", OpRead, 0, false, answers{-4, -4, 4096}, []error{goOn, goOn, nil}},
		{"read again", OpRead, 0, false, answers{-11, 4096}, []error{goOn, nil}},
		{"read gives too much", OpRead, 0, false, answers{4097}, []error{syscall.EIO}},
		{"read gives too much in the end", OpRead, 0, false, answers{4000, 97}, []error{goOn, syscall.EIO}},
		{"no errno", OpRead, 0, false, answers{-4096}, []error{syscall.EIO}},
		{"write whole", OpWrite, 0, false, answers{4096}, []error{nil}},
		{"write in pieces", OpWrite, 0, false, answers{4095, 1}, []error{goOn, nil}},
		{"write of nothing", OpWrite, 0, false, answers{0}, []error{syscall.ENOSPC}},
		{"write until full", OpWrite, 0, false, answers{512, -28}, []error{goOn, syscall.ENOSPC}},
		{"write until nothing moves", OpWrite, 0, false, answers{512, 0}, []error{goOn, syscall.ENOSPC}},
		{"direct write ends in a sector", OpWrite, 0, true, answers{100, 3996}, []error{goOn, nil}},
		{"durable write", OpWrite, fua, false, answers{4096}, []error{nil}},
		{"durable write, not known", OpWrite, fua, false, answers{-95, 4096, 0}, []error{goOn, goOn, nil}},
		{"durable write, not known, in pieces", OpWrite, fua, false, answers{-95, 4000, 96, 0}, []error{goOn, goOn, goOn, nil}},
		{"durable write, not known, sync fails", OpWrite, fua, false, answers{-95, 4096, -5}, []error{goOn, goOn, syscall.EIO}},
		{"durable write, not known twice", OpWrite, fua, false, answers{-95, -95}, []error{goOn, syscall.EOPNOTSUPP}},
		{"plain write, not known", OpWrite, 0, false, answers{-95}, []error{syscall.EOPNOTSUPP}},
		{"flush", OpFlush, 0, false, answers{0}, []error{nil}},
		{"flush interrupted", OpFlush, 0, false, answers{-4, 0}, []error{goOn, nil}},
		{"flush fails", OpFlush, 0, false, answers{-5}, []error{syscall.EIO}},
		{"discard", OpDiscard, 0, false, answers{0}, []error{nil}},
		{"discard not known", OpDiscard, 0, false, answers{-95}, []error{syscall.EOPNOTSUPP}},
		{"write zeroes", OpWriteZeroes, 0, false, answers{0}, []error{nil}},
		{"durable write zeroes", OpWriteZeroes, fua, false, answers{0, 0}, []error{goOn, nil}},
		{"durable write zeroes, sync fails", OpWriteZeroes, fua, false, answers{0, -5}, []error{goOn, syscall.EIO}},
	} {
		t.Run(c.name, func(t *testing.T) {
			buf := make([]byte, 4096)
			r := &Request{Op: c.op, Flags: c.flags, Length: 4096, file: &File{direct: c.direct}}
			if c.op == OpRead || c.op == OpWrite {
				r.Mem = []IOVec{IOVecOf(buf)}
			}
			for i, res := range c.res {
				nextStep(r)
				done, err := onResult(r, res)
				switch want := c.want[i]; {
				case want == goOn && done, want != goOn && !done:
					t.Fatalf("answer %d (%d): done %v, %v", i, res, done, err)
				case done && !errors.Is(err, want):
					t.Fatalf("answer %d (%d): %v, want %v", i, res, err, want)
				}
			}
		})
	}
}

// TestStepsOfADurableWrite follows what the kernel is asked for, on a file that does not know RWF_DSYNC and then on the
// same file again, which is not asked twice.
func TestStepsOfADurableWrite(t *testing.T) {
	f := &File{}
	follow := func(op Op, answers []int64, want []step) {
		t.Helper()
		r := &Request{Op: op, Flags: FlagFUA, Length: 8, file: f}
		for i, res := range answers {
			if got := nextStep(r); got != want[i] {
				t.Errorf("step %d is %d, want %d", i, got, want[i])
			}
			if done, err := onResult(r, res); done != (i == len(answers)-1) || err != nil {
				t.Errorf("answer %d: done %v, %v", i, done, err)
			}
		}
	}
	follow(OpWrite, []int64{8}, []step{stepWriteDurable})
	follow(OpWrite, []int64{-95, 8, 0}, []step{stepWriteDurable, stepWrite, stepSync})
	follow(OpWrite, []int64{8, 0}, []step{stepWrite, stepSync})
	follow(OpWriteZeroes, []int64{0, 0}, []step{stepZero, stepSync})
}

// TestNeverAgainForEver meets a file that always says EAGAIN.
func TestNeverAgainForEver(t *testing.T) {
	r := &Request{Op: OpRead, Length: 8, file: &File{}}
	for range 1000 {
		if done, err := onResult(r, -int64(syscall.EAGAIN)); done {
			if err != syscall.EAGAIN {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatal("asked a thousand times")
}

func TestEndOfFileIsBoth(t *testing.T) {
	var errno syscall.Errno
	if !errors.Is(endOfFile, io.ErrUnexpectedEOF) || !errors.As(endOfFile, &errno) || errno != syscall.EIO {
		t.Errorf("%v", endOfFile)
	}
}
