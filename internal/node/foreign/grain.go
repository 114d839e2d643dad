// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zlib"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/sparse"
	"github.com/sluice-blk/sluice/internal/format/vmdk"
)

// cachedGrains is how many inflated grains a queue keeps: enough for small reads in a row, and for a few rows side by side.
const cachedGrains = 8

// grainCache inflates grains and keeps the last few. It belongs to one queue.
type grainCache struct {
	slots  [cachedGrains]grainSlot
	turn   int64
	input  bytes.Reader
	reader io.ReadCloser // nil before the first grain
}

var errLargerThanGrain = errors.New("it is larger than a grain")

type grainSlot struct {
	host int64 // of the grain in the file; 0: empty
	used int64
	full []byte // a whole grain's memory
	n    int
}

func newGrainCache(grain int64) *grainCache {
	c := &grainCache{}
	for i := range c.slots {
		c.slots[i].full = make([]byte, grain)
	}
	return c
}

// find gives the grain that lies at host, or nil. It is the caller's until the next call of inflate.
func (c *grainCache) find(host int64) []byte {
	for i := range c.slots {
		if s := &c.slots[i]; s.host == host {
			c.turn++
			s.used = c.turn
			return s.full[:s.n]
		}
	}
	return nil
}

// inflate turns packed, which begins with the grain's marker, into a grain. When packed ends before the grain does, more is
// how much it must be.
func (c *grainCache) inflate(packed []byte, e sparse.Extent, grainSize int64) (grain []byte, more int64, err error) {
	if len(packed) < vmdk.MarkerSize {
		return nil, 0, block.Corruptf("the file ends inside the marker of the grain at %d", e.Host)
	}
	offset, length, err := vmdk.ParseMarker(packed)
	switch {
	case err != nil:
		return nil, 0, fmt.Errorf("%w: grain at %d: %w", block.ErrCorrupt, e.Host, err)
	case offset != e.Offset-e.Offset%grainSize:
		return nil, 0, block.Corruptf("the grain at %d says that it is the one of byte %d of the disk, and the table says %d", e.Host, offset, e.Offset-e.Offset%grainSize)
	case vmdk.MarkerSize+length > int64(len(packed)):
		return nil, vmdk.MarkerSize + length, nil
	}
	s := c.oldest()
	s.host = 0
	if s.n, err = c.decode(s.full, packed[vmdk.MarkerSize:vmdk.MarkerSize+length]); err != nil {
		return nil, 0, block.Corruptf("the compressed grain at %d: %v", e.Host, err)
	}
	c.turn++
	s.host, s.used = e.Host, c.turn
	return s.full[:s.n], 0, nil
}

func (c *grainCache) oldest() *grainSlot {
	oldest := &c.slots[0]
	for i := range c.slots {
		if c.slots[i].used < oldest.used {
			oldest = &c.slots[i]
		}
	}
	return oldest
}

// decode inflates packed into full and gives how much there was. More than full is an error, less is not: the last grain of
// a disk may be cut.
func (c *grainCache) decode(full, packed []byte) (n int, err error) {
	c.input.Reset(packed)
	if c.reader == nil {
		c.reader, err = zlib.NewReader(&c.input)
	} else {
		err = c.reader.(zlib.Resetter).Reset(&c.input, nil)
	}
	if err != nil {
		return 0, err
	}
	for n < len(full) {
		k, err := c.reader.Read(full[n:])
		n += k
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
	return n, c.atEnd()
}

// atEnd looks for the end of the stream, which is where its checksum is looked at.
func (c *grainCache) atEnd() error {
	var one [1]byte
	switch k, err := c.reader.Read(one[:]); {
	case k > 0:
		return errLargerThanGrain
	case err == nil:
		return io.ErrNoProgress
	case err != io.EOF:
		return err
	}
	return nil
}
