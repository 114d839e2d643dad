// SPDX-License-Identifier: Apache-2.0

package check

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// WidthError says that a cluster is used more often than refcounts of some width can count. It carries EINVAL.
type WidthError struct {
	Offset int64  // of the cluster
	Count  uint64 // its refcount
}

// Error is the text.
func (e *WidthError) Error() string {
	return fmt.Sprintf("change the width of refcounts: the cluster at %#x counts %d, which does not fit", e.Offset, e.Count)
}

// Unwrap gives the errno.
func (e *WidthError) Unwrap() error { return syscall.EINVAL }

// ChangeWidth gives an image of version 3 refcounts of 2^order bits. All references are counted anew and written behind
// everything else; the header changes in one write, so that a crash leaves the old refcounts or the new ones, and leaked
// clusters at worst. An image with errors is refused (EINVAL), and one where a count does not fit (a *WidthError); nothing
// is changed then.
func ChangeWidth(s Store, order uint32) error {
	c := &checker{s: s, o: &Options{}}
	if err := c.open(); err != nil {
		return err
	}
	if c.h.Version < 3 || order > qcow2.MaxRefcountOrder {
		return fmt.Errorf("change the width of refcounts: the format does not allow it: %w", syscall.EINVAL)
	}
	c.h.RefcountOrder = order
	c.g = c.h.Geometry()
	c.again = true // the old refcounts are given up
	if err := c.countReferences(); err != nil {
		return err
	}
	switch {
	case c.narrow != nil:
		return c.narrow
	case c.r.Corruptions != 0 || c.r.CheckErrors != 0:
		return fmt.Errorf("change the width of refcounts: the image has errors, which a check must repair first: %w", syscall.EINVAL)
	}
	if err := c.writeRefcounts(c.file); err != nil {
		return fmt.Errorf("change the width of refcounts: %w", err)
	}
	return nil
}
