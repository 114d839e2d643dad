// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"io"
	"syscall"

	"github.com/sluice-blk/sluice/internal/sys"
)

// step is what the kernel has to do next for a request.
type step uint8

const (
	stepRead step = iota
	stepWrite
	stepWriteDurable // with RWF_DSYNC
	stepSync         // fdatasync
	stepDiscard
	stepZero
)

// stage is how far a request that needs several steps has come.
type stage uint8

const (
	stageFirst stage = iota
	stagePlain       // a durable write goes out as a plain one, because the file cannot do RWF_DSYNC
	stageSync        // the data is where it belongs; what is left is to make it durable
)

// maxTries bounds how often an answer of EINTR or EAGAIN is met with the same request again. Both mean "not now" and
// go away; a file that never says anything else must become an error and not a loop that burns the CPU.
const maxTries = 64

// sectorGrid is the smallest logical block there is: a direct read that ends between its lines has met the end of the file.
const sectorGrid = 512

// endOfFile is the error of a read that the end of the file cut short. It is io.ErrUnexpectedEOF to a Go program and EIO
// to whoever looks for an errno.
var endOfFile error = &endError{}

type endError struct{}

func (*endError) Error() string { return "read beyond the end of the file" }

// Unwrap gives both faces.
func (*endError) Unwrap() []error { return []error{io.ErrUnexpectedEOF, syscall.EIO} }

// nextStep tells an engine what to ask for. It must be called once for each time the request goes to the kernel.
func nextStep(r *Request) step {
	if r.stage == stageSync {
		return stepSync
	}
	switch r.Op {
	case OpRead:
		return stepRead
	case OpFlush:
		return stepSync
	case OpDiscard:
		return stepDiscard
	case OpWriteZeroes:
		return stepZero
	}
	switch {
	case r.Flags&FlagFUA == 0:
		return stepWrite
	case r.file.noDSYNC:
		r.stage = stagePlain
		return stepWrite
	}
	return stepWriteDurable
}

// onResult takes what the kernel answered for one step of r: a count of bytes, or a negated errno. Either the request
// is done, with err as its outcome, or it has to go to the kernel again for its next step or the rest of this one.
func onResult(r *Request, res int64) (done bool, err error) {
	if res < 0 {
		return onErrno(r, res)
	}
	r.tries = 0
	if r.stage == stageSync || r.Op == OpFlush {
		return true, nil
	}
	if r.Op == OpRead || r.Op == OpWrite {
		if done, err = onMoved(r, res); !done || err != nil {
			return done, err
		}
	}
	if r.Flags&FlagFUA != 0 && (r.stage == stagePlain || r.Op == OpWriteZeroes) {
		r.stage = stageSync
		return false, nil
	}
	return true, nil
}

func onErrno(r *Request, res int64) (done bool, err error) {
	// The kernel's errnos end at 4095; what lies beyond is no errno.
	if res < -4095 {
		return true, syscall.EIO
	}
	e := syscall.Errno(-res)
	switch {
	case (e == syscall.EINTR || e == syscall.EAGAIN) && r.tries < maxTries:
		r.tries++
		return false, nil
	case e == syscall.EOPNOTSUPP && r.Op == OpWrite && r.Flags&FlagFUA != 0 && r.stage == stageFirst:
		// Told by the file once, remembered for all that follow.
		r.file.noDSYNC = true
		return false, nil
	}
	return true, e
}

// onMoved accounts for a transfer. It is not done while bytes are missing.
func onMoved(r *Request, n int64) (done bool, err error) {
	if n > r.Length-r.moved {
		return true, syscall.EIO // more than was asked for: not an answer to believe
	}
	r.moved += n
	switch {
	case r.moved == r.Length:
		return true, nil
	case r.Op == OpRead && (n == 0 || r.file.direct && (r.Offset+r.moved)%sectorGrid != 0):
		// A direct read is not continued between sectors: some file systems answer that with EINVAL.
		return true, onEnd(r)
	case n == 0:
		return true, syscall.ENOSPC
	}
	return false, nil
}

func onEnd(r *Request) error {
	if r.Flags&FlagZeroEOF == 0 {
		return endOfFile
	}
	return zeroRest(r.Mem, r.moved)
}

// settle takes what the kernel answered for one step of r and completes the request, or answers false: the engine has
// to queue it again.
func (l *Loop) settle(c *EngineCounters, r *Request, res int64) bool {
	done, err := onResult(r, res)
	if !done {
		c.Resubmits++
		return false
	}
	l.conclude(c, r, err)
	return true
}

// conclude ends an engine's part in a request. The outcome is dispatched later in this turn.
func (l *Loop) conclude(c *EngineCounters, r *Request, err error) {
	if err != nil {
		c.Errors++
	}
	r.file.pending--
	r.file = nil
	l.CompleteLater(r, err)
}

// fallocMode is how fallocate(2) carries out the discard or write of zeroes that r asks for on a regular file.
func fallocMode(r *Request) uint32 {
	if r.Op == OpDiscard || r.Flags&FlagUnmap != 0 {
		return sys.FALLOC_FL_PUNCH_HOLE | sys.FALLOC_FL_KEEP_SIZE
	}
	return sys.FALLOC_FL_ZERO_RANGE | sys.FALLOC_FL_KEEP_SIZE
}
