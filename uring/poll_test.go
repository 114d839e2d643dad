// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"syscall"
	"testing"
	"time"
)

func TestPollOnce(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		pr, pw := pipe(t)
		s := sqe(t, r)
		s.PrepPollAdd(pr, POLLIN, 0)
		s.UserData = 1
		quiet(t, r)
		put(t, pw, "x")
		if c := one(t, r, 1); c.Res != int32(POLLIN) || c.More() {
			t.Errorf("completion %+v", c)
		}
		put(t, pw, "x")
		quiet(t, r)
		must(t, r, "poll of what is ready", int32(POLLIN), func(s *SQE) { s.PrepPollAdd(pr, POLLIN|POLLOUT, 0) })
		fails(t, r, "poll of a bad descriptor", syscall.EBADF, func(s *SQE) { s.PrepPollAdd(-1, POLLIN, 0) })
	})
}

// needMultishot skips the test on kernels without multishot poll; no feature bit of its own tells of it, RSRC_TAGS came
// with the same kernel.
func needMultishot(t *testing.T, r *Ring) {
	if r.Features()&FeatRsrcTags == 0 {
		missing(t, "multishot poll", "5.13")
	}
}

func TestPollMultishotTellsEachWakeupOnce(t *testing.T) {
	r := newTestRing(t, 8, nil)
	needMultishot(t, r)
	pr, pw := pipe(t)
	s := sqe(t, r)
	s.PrepPollAdd(pr, POLLIN, IORING_POLL_ADD_MULTI)
	s.UserData = 1
	for range 3 {
		put(t, pw, "x")
		if c := one(t, r, 1); c.Res != int32(POLLIN) || !c.More() {
			t.Fatalf("completion %+v", c)
		}
		quiet(t, r) // edge-triggered: still readable, not told again
	}
	s = sqe(t, r)
	s.PrepPollRemove(1)
	s.UserData = 2
	m := byUserData(t, wait(t, r, 2))
	wantRes(t, m, 1, -int32(syscall.ECANCELED))
	wantRes(t, m, 2, 0)
	if c := m[1]; c.More() {
		t.Error("the end of a multishot poll promises more")
	}
}

func TestPollRemove(t *testing.T) {
	r := newTestRing(t, 8, nil)
	pr, _ := pipe(t)
	s := sqe(t, r)
	s.PrepPollAdd(pr, POLLIN, 0)
	s.UserData = 1
	s = sqe(t, r)
	s.PrepPollRemove(1)
	s.UserData = 2
	m := byUserData(t, wait(t, r, 2))
	wantRes(t, m, 1, -int32(syscall.ECANCELED))
	wantRes(t, m, 2, 0)
	fails(t, r, "remove again", syscall.ENOENT, func(s *SQE) { s.PrepPollRemove(1) })
}

func TestPollUpdate(t *testing.T) {
	r := newTestRing(t, 8, nil)
	needMultishot(t, r)
	_, pw := pipe(t)
	s := sqe(t, r)
	s.PrepPollAdd(pw, POLLPRI, 0) // never comes
	s.UserData = 1
	s = sqe(t, r)
	s.PrepPollUpdate(1, 9, POLLOUT, IORING_POLL_UPDATE_EVENTS|IORING_POLL_UPDATE_USER_DATA)
	s.UserData = 2
	m := byUserData(t, wait(t, r, 2))
	wantRes(t, m, 2, 0)
	wantRes(t, m, 9, int32(POLLOUT))
}

func TestTimeouts(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		soon, late, past := &Timespec{Nsec: 1000}, &Timespec{Sec: 1000}, &Timespec{Nsec: 1}
		fails(t, r, "time", syscall.ETIME, func(s *SQE) { s.PrepTimeout(soon, 0, 0) })
		fails(t, r, "time of day long past", syscall.ETIME, func(s *SQE) { s.PrepTimeout(past, 0, IORING_TIMEOUT_ABS) })
		fails(t, r, "time that is none", syscall.EINVAL, func(s *SQE) { s.PrepTimeout(&Timespec{Nsec: -1}, 0, 0) })

		s := sqe(t, r)
		s.PrepTimeout(late, 2, 0)
		s.UserData = 1
		for i := range uint64(2) {
			s = sqe(t, r)
			s.PrepNop()
			s.UserData = 2 + i
		}
		wantRes(t, byUserData(t, wait(t, r, 3)), 1, 0) // the count came first

		s = sqe(t, r)
		s.PrepTimeout(late, 0, 0)
		s.UserData = 1
		s = sqe(t, r)
		s.PrepTimeoutRemove(1)
		s.UserData = 2
		m := byUserData(t, wait(t, r, 2))
		wantRes(t, m, 1, -int32(syscall.ECANCELED))
		wantRes(t, m, 2, 0)
		fails(t, r, "remove again", syscall.ENOENT, func(s *SQE) { s.PrepTimeoutRemove(1) })
	})
}

func TestTimeoutUpdate(t *testing.T) {
	r := newTestRing(t, 8, nil)
	if r.Features()&FeatExtArg == 0 {
		missing(t, "timeout update", "5.11")
	}
	s := sqe(t, r)
	s.PrepTimeout(&Timespec{Sec: 1000}, 0, 0)
	s.UserData = 1
	s = sqe(t, r)
	s.PrepTimeoutUpdate(1, &Timespec{Nsec: 1000}, 0)
	s.UserData = 2
	m := byUserData(t, wait(t, r, 2))
	wantRes(t, m, 1, -int32(syscall.ETIME))
	wantRes(t, m, 2, 0)
}

func TestTimeoutMultishot(t *testing.T) {
	r := newTestRing(t, 8, nil)
	s := sqe(t, r)
	s.PrepTimeout(&Timespec{Nsec: 1000}, 3, IORING_TIMEOUT_MULTISHOT)
	s.UserData = 1
	for i := range 3 {
		c := one(t, r, 1)
		if c.Res == -int32(syscall.EINVAL) {
			missing(t, "multishot timeout", "6.4")
		}
		if c.Res != -int32(syscall.ETIME) || c.More() != (i < 2) {
			t.Errorf("completion %d: %+v", i, c)
		}
	}
	quiet(t, r)
}

func TestLinkTimeoutCancelsItsRequest(t *testing.T) {
	r := newTestRing(t, 8, nil)
	pr, pw := pipe(t)
	b := make([]byte, 1)
	linked := func(ts *Timespec) {
		s := sqe(t, r)
		s.PrepPollAdd(pr, POLLIN, 0)
		s.AddFlags(IOSQE_IO_LINK)
		s.UserData = 1
		s = sqe(t, r)
		s.PrepLinkTimeout(ts, 0)
		s.UserData = 2
	}
	linked(&Timespec{Nsec: 1000})
	m := byUserData(t, wait(t, r, 2))
	wantRes(t, m, 1, -int32(syscall.ECANCELED))
	wantRes(t, m, 2, -int32(syscall.ETIME))

	linked(&Timespec{Sec: 1000})
	quiet(t, r)
	put(t, pw, "x")
	m = byUserData(t, wait(t, r, 2))
	wantRes(t, m, 1, int32(POLLIN))
	wantRes(t, m, 2, -int32(syscall.ECANCELED))
	must(t, r, "read", 1, func(s *SQE) { s.PrepRead(pr, b, 0) })
}

func TestCancel(t *testing.T) {
	const blocked, cancel = 1, 100
	canceled := -int32(syscall.ECANCELED)
	for _, c := range []struct {
		name    string
		since   string // "" is 5.10
		prep    func(s *SQE, fd int)
		n       int   // requests that end
		res     int32 // of the cancellation
		pending int   // requests with user data 1 on the descriptor
	}{
		{"by user data", "", func(s *SQE, _ int) { s.PrepCancel(blocked, 0) }, 1, 0, 1},
		{"missing", "", func(s *SQE, _ int) { s.PrepCancel(999, 0) }, 0, -int32(syscall.ENOENT), 1},
		{"all by user data", "5.19", func(s *SQE, _ int) { s.PrepCancel(blocked, IORING_ASYNC_CANCEL_ALL) }, 3, 3, 3},
		{"one by descriptor", "5.19", func(s *SQE, fd int) { s.PrepCancelFd(fd, 0) }, 1, 0, 3},
		{"all by descriptor", "5.19", func(s *SQE, fd int) { s.PrepCancelFd(fd, IORING_ASYNC_CANCEL_ALL) }, 3, 3, 3},
		{"any", "5.19", func(s *SQE, _ int) { s.PrepCancel(0, IORING_ASYNC_CANCEL_ANY) }, 3, 3, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newTestRing(t, 8, nil)
			pr, pw := pipe(t)
			for range c.pending {
				s := sqe(t, r)
				s.PrepPollAdd(pr, POLLIN, 0)
				s.UserData = blocked
			}
			quiet(t, r)
			s := sqe(t, r)
			c.prep(s, pr)
			s.UserData = cancel
			for _, got := range wait(t, r, c.n+1) {
				switch {
				case got.UserData == cancel && c.since != "" && got.Res == -int32(syscall.EINVAL):
					missing(t, "cancellation flags", c.since)
				case got.UserData == cancel && got.Res != c.res:
					t.Errorf("cancellation gave %d, want %d", got.Res, c.res)
				case got.UserData == blocked && got.Res != canceled:
					t.Errorf("request gave %d", got.Res)
				}
			}
			put(t, pw, "x") // the rest was not touched
			for _, got := range wait(t, r, c.pending-c.n) {
				if got.Res != int32(POLLIN) {
					t.Errorf("request that was not cancelled gave %d", got.Res)
				}
			}
		})
	}
}

func TestTimespecOf(t *testing.T) {
	for d, want := range map[time.Duration]Timespec{
		0:                       {},
		1500 * time.Millisecond: {1, 5e8},
		time.Hour + 1:           {3600, 1},
	} {
		if got := TimespecOf(d); got != want {
			t.Errorf("%v is %+v, want %+v", d, got, want)
		}
	}
}
