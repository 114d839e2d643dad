// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"strings"
)

// magic is how images of a format begin.
type magic struct {
	format string
	at     int
	bytes  string
}

var magics = []magic{
	{FormatQcow2, 0, "QFI\xfb\x00\x00\x00\x02"},
	{FormatQcow2, 0, "QFI\xfb\x00\x00\x00\x03"},
	{"vmdk", 0, "KDMV"},
	{"vmdk", 0, "COWD"},
	{"vhdx", 0, "vhdxfile"},
	{"vpc", 0, "conectix"},
	{"vdi", 64, "\x7f\x10\xda\xbe"},
}

// probeSize is as much of a file as probing looks at.
const probeSize = 2048

// Probe tells the format that a file seems to have: raw when it has none that is known.
func Probe(s *Store) (string, error) {
	head := make([]byte, probeSize)
	if err := s.Read(head, 0); err != nil {
		return "", err
	}
	for _, m := range magics {
		if bytes.HasPrefix(head[m.at:], []byte(m.bytes)) {
			return m.format, nil
		}
	}
	if isDescriptor(head) {
		return "vmdk", nil
	}
	return FormatRaw, nil
}

// isDescriptor recognises the text of a vmdk descriptor: comments and blank lines, then the version.
func isDescriptor(head []byte) bool {
	for line := range strings.Lines(string(head)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		v, ok := strings.CutPrefix(line, "version=")
		return ok && (v == "1" || v == "2" || v == "3")
	}
	return false
}
