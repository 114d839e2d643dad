// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/internal/block"
)

// rule is one statement.
type rule struct {
	op    block.Op
	any   bool
	first int64 // of the range; -1 when there is none
	last  int64
	errno syscall.Errno
	err   error // what a request fails with, made once; nil for a mere delay
	short int64 // -1 is none
	delay time.Duration
	after int64
	count int64 // 0 is all

	seen atomic.Int64
}

func (f *rule) matches(r *block.Request) bool {
	switch {
	case !f.any && f.op != r.Op:
		return false
	case f.first < 0:
		return true
	case r.Op == block.OpFlush:
		return false
	}
	return r.Offset <= f.last && r.Offset+r.Length > f.first
}

// applies counts a request that matches, and tells whether it is one of those that are meant.
func (f *rule) applies() bool {
	n := f.seen.Add(1) - f.after
	return n > 0 && (f.count == 0 || n <= f.count)
}

// The text comes from a person; these bound what a mistake can cost.
const (
	maxText  = 64 << 10
	maxRules = 256
)

// parse reads a text. See the package comment.
func parse(text string) ([]*rule, error) {
	if len(text) > maxText {
		return nil, fmt.Errorf("text of %d bytes is longer than %d", len(text), maxText)
	}
	var rules []*rule
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		for _, statement := range strings.Split(line, ";") {
			words := strings.Fields(statement)
			if len(words) == 0 {
				continue
			}
			f, err := parseStatement(words)
			if err != nil {
				return nil, fmt.Errorf("line %d: %q: %w", i+1, strings.TrimSpace(statement), err)
			}
			rules = append(rules, f)
			if len(rules) > maxRules {
				return nil, fmt.Errorf("line %d: more than %d statements", i+1, maxRules)
			}
		}
	}
	return rules, nil
}

func parseStatement(words []string) (*rule, error) {
	f := &rule{first: -1, short: -1}
	if err := f.setOp(words[0]); err != nil {
		return nil, err
	}
	words = words[1:]
	if len(words) > 0 && !strings.Contains(words[0], "=") {
		if err := f.setRange(words[0]); err != nil {
			return nil, err
		}
		words = words[1:]
	}
	given := map[string]bool{}
	for _, w := range words {
		key, value, ok := strings.Cut(w, "=")
		if !ok {
			return nil, fmt.Errorf("want key=value in place of %q", w)
		}
		if given[key] {
			return nil, fmt.Errorf("%s is given twice", key)
		}
		given[key] = true
		if err := f.setKey(key, value); err != nil {
			return nil, err
		}
	}
	if !given["error"] && !given["short"] && !given["delay"] {
		return nil, fmt.Errorf("it says nothing to do (want error=, short= or delay=)")
	}
	if given["short"] && !given["error"] {
		f.errno = syscall.EIO
	}
	if f.errno != 0 {
		f.err = fmt.Errorf("injected fault: %w", f.errno)
	}
	return f, nil
}

func (f *rule) setOp(word string) error {
	if word == "any" {
		f.any = true
		return nil
	}
	for op := block.OpRead; op <= block.OpWriteZeroes; op++ {
		if op.String() == word {
			f.op = op
			return nil
		}
	}
	return fmt.Errorf("unknown operation %q (want read, write, flush, discard, write-zeroes or any)", word)
}

func (f *rule) setRange(word string) error {
	if !f.any && f.op == block.OpFlush {
		return fmt.Errorf("a flush has no range")
	}
	first, last, more := strings.Cut(word, "-")
	var err error
	if f.first, err = parseSize(first); err != nil {
		return err
	}
	f.last = f.first
	if more {
		if f.last, err = parseSize(last); err != nil {
			return err
		}
	}
	if f.last < f.first {
		return fmt.Errorf("range %q ends before it begins", word)
	}
	return nil
}

func (f *rule) setKey(key, value string) (err error) {
	switch key {
	case "error":
		f.errno, err = parseErrno(value)
	case "short":
		f.short, err = parseSize(value)
	case "after":
		f.after, err = parseNumber(value)
	case "count":
		if f.count, err = parseNumber(value); err == nil && f.count == 0 {
			return fmt.Errorf("count=0 would never apply")
		}
	case "delay":
		f.delay, err = time.ParseDuration(value)
		if err == nil && (f.delay <= 0 || f.delay > time.Hour) {
			return fmt.Errorf("delay %q is not between 1ns and 1h", value)
		}
	default:
		return fmt.Errorf("unknown key %q (want error, short, delay, after or count)", key)
	}
	return err
}

// String is a statement that means the same.
func (f *rule) String() string {
	var b strings.Builder
	b.WriteString(f.op.String())
	if f.any {
		b.Reset()
		b.WriteString("any")
	}
	if f.first >= 0 {
		fmt.Fprintf(&b, " %d-%d", f.first, f.last)
	}
	if f.errno != 0 {
		fmt.Fprintf(&b, " error=%d", int(f.errno))
	}
	if f.short >= 0 {
		fmt.Fprintf(&b, " short=%d", f.short)
	}
	if f.delay > 0 {
		fmt.Fprintf(&b, " delay=%s", f.delay)
	}
	if f.after > 0 {
		fmt.Fprintf(&b, " after=%d", f.after)
	}
	if f.count > 0 {
		fmt.Fprintf(&b, " count=%d", f.count)
	}
	return b.String()
}

func parseNumber(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 62)
	if err != nil {
		return 0, fmt.Errorf("%q is no number", s)
	}
	return int64(n), nil
}

func parseSize(s string) (int64, error) {
	shift := 0
	if s != "" {
		shift = 10 * (strings.IndexByte("KMGT", s[len(s)-1]) + 1)
	}
	digits := s
	if shift > 0 {
		digits = s[:len(s)-1]
	}
	n, err := parseNumber(digits)
	if err != nil || n > math.MaxInt64>>shift>>1 {
		return 0, fmt.Errorf("%q is no number of bytes", s)
	}
	return n << shift, nil
}

// errnos are those that storage answers with.
var errnos = map[string]syscall.Errno{
	"EPERM": syscall.EPERM, "EINTR": syscall.EINTR, "EIO": syscall.EIO, "ENXIO": syscall.ENXIO, "EBADF": syscall.EBADF,
	"EAGAIN": syscall.EAGAIN, "ENOMEM": syscall.ENOMEM, "EACCES": syscall.EACCES, "EFAULT": syscall.EFAULT,
	"EBUSY": syscall.EBUSY, "ENODEV": syscall.ENODEV, "EINVAL": syscall.EINVAL, "EFBIG": syscall.EFBIG,
	"ENOSPC": syscall.ENOSPC, "EROFS": syscall.EROFS, "ENOSYS": syscall.ENOSYS, "ENOLINK": syscall.ENOLINK,
	"EILSEQ": syscall.EILSEQ, "EOPNOTSUPP": syscall.EOPNOTSUPP, "ENOTSUP": syscall.ENOTSUP,
	"ETIMEDOUT": syscall.ETIMEDOUT, "ESTALE": syscall.ESTALE, "EDQUOT": syscall.EDQUOT, "EREMOTEIO": syscall.EREMOTEIO,
	"ECANCELED": syscall.ECANCELED, "ENODATA": syscall.ENODATA,
}

func parseErrno(s string) (syscall.Errno, error) {
	if e, ok := errnos[s]; ok {
		return e, nil
	}
	n, err := strconv.ParseUint(s, 10, 12)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("unknown error %q (want the name of an errno, such as EIO, or its number)", s)
	}
	return syscall.Errno(n), nil
}
