// SPDX-License-Identifier: Apache-2.0

package graph

import (
	"bytes"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/file"
)

// magic is how an image of some format begins.
type magic struct {
	format string
	offset int
	bytes  string
}

// magics are the formats that are recognised, so as to refuse to show their insides as a raw disk.
var magics = []magic{
	{"qcow2", 0, "QFI\xfb\x00\x00\x00\x02"},
	{"qcow2", 0, "QFI\xfb\x00\x00\x00\x03"},
	{"qcow", 0, "QFI\xfb"},
	{"qed", 0, "QED\x00"},
	{"vmdk", 0, "KDMV"},
	{"vmdk", 0, "COWD"},
	{"vmdk", 0, "# Disk DescriptorFile"},
	{"vhdx", 0, "vhdxfile"},
	{"vhd", 0, "conectix"},
	{"vdi", 64, "\x7f\x10\xda\xbe"},
	{"parallels", 0, "WithoutFreeSpace"},
	{"parallels", 0, "WithouFreSpacExt"},
	{"luks", 0, "LUKS\xba\xbe"},
	{"bochs", 0, "Bochs Virtual HD Image"},
}

// headSize is as much of an image as the magics need.
const headSize = 512

// probe refuses an image that begins as one of another format than raw.
func probe(s Spec, n block.Node) (block.Node, error) {
	f, ok := n.(*file.Node)
	if s.Format != FormatProbe || !ok {
		return n, nil
	}
	head, err := f.Head(headSize)
	if err != nil {
		return nil, fmt.Errorf("probe %q: %w", s.Path, err)
	}
	if format := recognise(head); format != "" {
		return nil, fmt.Errorf("probe %q: it begins as a %s image, which is not supported yet: %w (convert it with qemu-img convert -O raw; if it is a raw disk whose guest wrote that, use format=raw)",
			s.Path, format, syscall.ENOTSUP)
	}
	return n, nil
}

// recognise names the format that an image with this beginning has; empty is none that is known.
func recognise(head []byte) string {
	for _, m := range magics {
		if len(head) >= m.offset && bytes.HasPrefix(head[m.offset:], []byte(m.bytes)) {
			return m.format
		}
	}
	return ""
}
