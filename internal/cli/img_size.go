// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"math"

	"github.com/sluice-blk/sluice/internal/img"
)

// namedSize reads a size that a person gives, what being its name in messages.
func (c *imgCall) namedSize(what, s string) (n int64, ok bool) {
	n, err := img.ParseImageSize(s)
	switch {
	case errors.Is(err, img.ErrSizeRange):
		c.errorf("Invalid %s specified. Must be between 0 and %d.", what, int64(math.MaxInt64))
		return 0, false
	case err != nil:
		c.errorf("Invalid %s specified. You may use k, M, G, T, P or E suffixes for", what)
		c.errorf("kilobytes, megabytes, gigabytes, terabytes, petabytes and exabytes.")
		return 0, false
	}
	return n, true
}

// imageSize reads the size of an image.
func (c *imgCall) imageSize(s string) (int64, bool) { return c.namedSize("image size", s) }
