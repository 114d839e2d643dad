// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode/utf16"
)

// WriteJSON writes v as qemu-img's tools write JSON: four spaces a level, an empty list over two lines, and nothing but
// ASCII.
func WriteJSON(w io.Writer, v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "    ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	var out strings.Builder
	for line := range strings.Lines(b.String()) {
		writeASCII(&out, openEmptyList(line))
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// openEmptyList puts the end of an empty list on a line of its own. A line that ends so cannot be the end of a string.
func openEmptyList(line string) string {
	for _, end := range []string{"[],\n", "[]\n"} {
		if head, ok := strings.CutSuffix(line, end); ok {
			indent := line[:len(line)-len(strings.TrimLeft(line, " "))]
			return head + "[\n" + indent + end[1:]
		}
	}
	return line
}

// writeASCII escapes what is beyond ASCII, which only strings have.
func writeASCII(out *strings.Builder, s string) {
	for _, r := range s {
		switch {
		case r < 0x7f:
			out.WriteRune(r)
		case r > 0xffff:
			hi, lo := utf16.EncodeRune(r)
			fmt.Fprintf(out, "\\u%04X\\u%04X", hi, lo)
		default:
			fmt.Fprintf(out, "\\u%04X", r)
		}
	}
}
