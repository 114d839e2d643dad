// SPDX-License-Identifier: Apache-2.0

package aio

// Stamp is the latest reading of the loop's clock, on which nothing is spent: the turn's own ([Loop.Now]) or a later one
// that somebody had a reason to make within the turn. It never goes back. It serves statistics; timers go by Now.
//
// Must be called on the loop.
func (l *Loop) Stamp() int64 { return l.stamp }

// Tick reads the clock for Stamp and answers what it read. It is for once a batch, never for each request.
//
// Must be called on the loop.
func (l *Loop) Tick() int64 {
	l.stamp = nanotime()
	return l.stamp
}

// times are the moments of a request that only its engine knows, as of the loop's Stamp.
type times struct {
	queued    int64 // the engine got it; 0: no engine has
	submitted int64 // it was handed to the kernel
}

// Times tells when the request came to an engine's queue and when it was handed to the kernel, on the loop's clock; each is
// 0 when that has not happened since ForgetTimes. Of a transfer that was continued they are the last hand-over's.
//
// Must be called on the loop, by the request's holder.
func (r *Request) Times() (queued, submitted int64) { return r.times.queued, r.times.submitted }

// ForgetTimes makes the request one that no engine has seen. Owners that want to read Times call it before Submit.
//
// Must be called on the loop, by the request's holder.
func (r *Request) ForgetTimes() { r.times = times{} }

// AdoptTimes takes over the times of a request that was made to carry out r, or a part of it. Of several the first one
// counts, so that all of their work is seen as the kernel's.
//
// Must be called on the loop, by the holder of both.
func (r *Request) AdoptTimes(part *Request) {
	if r.times.queued == 0 {
		r.times = part.times
	}
}
