// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// A client decides how often it connects, breaks its queue or sends nonsense, and each is worth a line; so it would
// decide how fast the log grows. quietBurst lines of one text go out at once, enough for a person to see the pattern, and
// then one every quietPause, which says how many were left out.
const (
	quietBurst = 20
	quietPause = 10 * time.Second
)

// quietHandler passes on log records, within the bounds above for each text. Texts are constants of this program, so
// that there are few. Safe for concurrent use.
type quietHandler struct {
	slog.Handler
	shared *quietTexts
}

type quietTexts struct {
	now func() time.Time
	mu  sync.Mutex
	by  map[string]*quietText
}

// quietText is what is known of one text.
type quietText struct {
	left    int       // lines that may still go out at once
	refill  time.Time // when the next one may, with none left
	dropped int
}

func newQuietHandler(h slog.Handler, now func() time.Time) slog.Handler {
	return &quietHandler{h, &quietTexts{now: now, by: make(map[string]*quietText)}}
}

func (h *quietHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &quietHandler{h.Handler.WithAttrs(attrs), h.shared}
}

func (h *quietHandler) WithGroup(name string) slog.Handler {
	return &quietHandler{h.Handler.WithGroup(name), h.shared}
}

func (h *quietHandler) Handle(ctx context.Context, r slog.Record) error {
	dropped, ok := h.shared.admit(r.Message)
	if !ok {
		return nil
	}
	if dropped > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("left_out", dropped))
	}
	return h.Handler.Handle(ctx, r)
}

// admit tells whether a line may go out, and how many like it did not since the last one that did.
func (q *quietTexts) admit(text string) (dropped int, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	t := q.by[text]
	if t == nil {
		t = &quietText{left: quietBurst}
		q.by[text] = t
	}
	switch {
	case t.left > 0:
		t.left--
		t.refill = now.Add(quietPause)
	case now.After(t.refill.Add(quietBurst * quietPause)): // long silence: a new burst is news again
		t.left = quietBurst - 1
		t.refill = now.Add(quietPause)
	case now.Before(t.refill):
		t.dropped++
		return 0, false
	default:
		t.refill = now.Add(quietPause)
	}
	dropped, t.dropped = t.dropped, 0
	return dropped, true
}
