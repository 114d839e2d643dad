// SPDX-License-Identifier: Apache-2.0

package graph

import (
	"bytes"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/foreign"
)

// magic is how an image of some format begins.
type magic struct {
	format string
	offset int
	bytes  string
}

// magics are the formats that are recognised besides those of node/foreign, so as to refuse to show their insides as a raw
// disk.
var magics = []magic{
	{"qcow2", 0, "QFI\xfb\x00\x00\x00\x02"},
	{"qcow2", 0, "QFI\xfb\x00\x00\x00\x03"},
	{"qcow", 0, "QFI\xfb"},
	{"qed", 0, "QED\x00"},
	{"parallels", 0, "WithoutFreeSpace"},
	{"parallels", 0, "WithouFreSpacExt"},
	{"luks", 0, "LUKS\xba\xbe"},
	{"bochs", 0, "Bochs Virtual HD Image"},
}

// headSize is as much of an image as the magics need.
const headSize = 512

// probe gives the format to open an image with: the one that was named, or what it begins as when probing was asked for.
// One that cannot be opened is refused: it is no raw disk, unless somebody says so.
func probe(s Spec, n block.Node) (string, error) {
	f, ok := n.(*file.Node)
	if s.Format != FormatProbe || !ok {
		return s.Format, nil
	}
	head, err := f.Head(headSize)
	if err != nil {
		return "", fmt.Errorf("probe %q: %w", s.Path, err)
	}
	format := recognise(head)
	switch {
	case format == "":
		return FormatRaw, nil
	case foreign.Known(format) && s.ReadOnly:
		return format, nil
	case format == FormatQcow2:
		return "", fmt.Errorf("probe %q: it begins as a qcow2 image: %w (use format=qcow2; if it is a raw disk whose guest wrote that, use format=raw)",
			s.Path, syscall.ENOTSUP)
	case foreign.Known(format):
		return "", fmt.Errorf("probe %q: it begins as a %s image, which is only read: %w (set readonly, or convert it; if it is a raw disk whose guest wrote that, use format=raw)",
			s.Path, format, syscall.ENOTSUP)
	}
	return "", fmt.Errorf("probe %q: it begins as a %s image, which is not supported yet: %w (convert it with qemu-img convert -O raw; if it is a raw disk whose guest wrote that, use format=raw)",
		s.Path, format, syscall.ENOTSUP)
}

// recognise names the format that an image with this beginning has; empty is none that is known.
func recognise(head []byte) string {
	for _, m := range magics {
		if len(head) >= m.offset && bytes.HasPrefix(head[m.offset:], []byte(m.bytes)) {
			return m.format
		}
	}
	return foreign.Probe(head)
}
