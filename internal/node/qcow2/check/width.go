// SPDX-License-Identifier: Apache-2.0

package check

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// ChangeWidth gives an image of version 3 refcounts of 2^order bits. All references are counted anew and written behind
// everything else; the header changes in one write, so that a crash leaves the old refcounts or the new ones, and leaked
// clusters at worst. An image with errors is refused, and one where a count does not fit (EINVAL); nothing is changed
// then.
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
	if c.r.Corruptions != 0 || c.r.CheckErrors != 0 {
		return fmt.Errorf("change the width of refcounts: the image has errors, or uses a cluster more often than the new width can count: %w", syscall.EINVAL)
	}
	if err := c.writeRefcounts(c.file); err != nil {
		return fmt.Errorf("change the width of refcounts: %w", err)
	}
	return nil
}
