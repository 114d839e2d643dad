// SPDX-License-Identifier: Apache-2.0

package vmdk

import (
	"bytes"
	"strconv"
	"strings"

	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// DescriptorMagic begins a descriptor, also one that is a file of its own.
const DescriptorMagic = "# Disk DescriptorFile"

const (
	// maxDescriptor bounds the text: those of hundreds of extents have some tens of KiB.
	maxDescriptor = 1 << 20
	maxExtents    = 4096
	noParent      = 0xffffffff
)

// Descriptor is what the text tells about an image.
type Descriptor struct {
	CID, ParentCID uint32
	CreateType     string
	Extents        []Extent
}

// Extent is a part of the disk as the text tells it.
type Extent struct {
	Sectors int64
	Type    string // FLAT, SPARSE, ZERO, VMFS ...
	File    string // as it stands there; "" for ZERO
	Offset  int64  // sectors, FLAT only
}

// parseDescriptor reads the lines that are known. What is not known, and what is no line at all, is passed over, as
// everybody does. The text ends at the first zero byte.
func parseDescriptor(text []byte) (*Descriptor, error) {
	if k := bytes.IndexByte(text, 0); k >= 0 {
		text = text[:k]
	}
	d := &Descriptor{ParentCID: noParent}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "#") {
			continue
		}
		if e, ok := parseExtent(line); ok {
			if len(d.Extents) == maxExtents {
				return nil, sparse.Unsupportedf("VMDK descriptor with more than %d extents", maxExtents)
			}
			d.Extents = append(d.Extents, e)
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			continue
		}
		if err := d.set(strings.TrimSpace(key), strings.Trim(strings.TrimSpace(value), `"`)); err != nil {
			return nil, err
		}
	}
	return d, nil
}

func (d *Descriptor) set(key, value string) (err error) {
	switch key {
	case "CID":
		d.CID, err = parseCID(key, value)
	case "parentCID":
		d.ParentCID, err = parseCID(key, value)
	case "createType":
		d.CreateType = value
	}
	return err
}

func parseCID(key, value string) (uint32, error) {
	n, err := strconv.ParseUint(value, 16, 32)
	if err != nil {
		return 0, sparse.Corruptf("VMDK descriptor: %s is %q, want 8 hexadecimal digits", key, value)
	}
	return uint32(n), nil
}

// parseExtent reads a line such as: RW 81920 FLAT "disk-flat.vmdk" 0
func parseExtent(line string) (e Extent, ok bool) {
	access, rest, _ := strings.Cut(line, " ")
	if access != "RW" && access != "RDONLY" && access != "NOACCESS" {
		return e, false
	}
	head, name, quoted := strings.Cut(rest, `"`)
	words := strings.Fields(head)
	if len(words) != 2 {
		return e, false
	}
	n, err := strconv.ParseInt(words[0], 10, 64)
	if err != nil || n < 0 || n > maxSectors {
		return e, false
	}
	e = Extent{Sectors: n, Type: words[1]}
	if quoted {
		var tail string
		e.File, tail, _ = strings.Cut(name, `"`)
		if f := strings.Fields(tail); len(f) > 0 {
			e.Offset, _ = strconv.ParseInt(f[0], 10, 64) // told to people, and followed by nobody
		}
	}
	return e, true
}
