// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestCompare(t *testing.T) {
	const size = 3 << 20
	data := patchwork(11, size)
	change := func(at int) []byte {
		b := slices.Clone(data)
		b[at] ^= 1
		return b
	}
	longer := append(slices.Clone(data), make([]byte, 1<<20)...)
	tail := slices.Clone(longer)
	tail[len(tail)-1] = 1
	twice := change(2 << 20)
	twice[1<<20+700] ^= 1
	for name, c := range map[string]struct {
		a, b         []byte
		holesA       bool
		strict       bool
		faultA       string
		want         string
		outcome      int
		errorMention string
	}{
		"same":                          {a: data, b: data, holesA: true, want: "Images are identical."},
		"one bit":                       {a: data, b: change(1234567), want: fmt.Sprintf("Content mismatch at offset %d!", 1234567&^511), outcome: CompareDiffer},
		"the first of two":              {a: data, b: twice, want: fmt.Sprintf("Content mismatch at offset %d!", (1<<20+700)&^511), outcome: CompareDiffer},
		"longer with zeros":             {a: data, b: longer, want: "Warning: Image size mismatch!|Images are identical."},
		"longer with data":              {a: tail, b: data, want: fmt.Sprintf("Warning: Image size mismatch!|Content mismatch at offset %d!", len(tail)-512), outcome: CompareDiffer},
		"strict size":                   {a: data, b: longer, strict: true, want: "Strict mode: Image size mismatch!", outcome: CompareDiffer},
		"strict storage":                {a: make([]byte, 8192), b: make([]byte, 8192), holesA: true, strict: true, want: "Strict mode: Offset 0 block status mismatch!", outcome: CompareDiffer},
		"read error":                    {a: data, b: data, faultA: "read 1M error=EIO", outcome: CompareReadFailed, errorMention: "Error while reading offset "},
		"a difference before the error": {a: data, b: change(5), faultA: "read 2M error=EIO", want: "Content mismatch at offset 0!", outcome: CompareDiffer},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			var said []string
			r := Compare{A: l.disk(0, l.file(c.a, c.holesA), c.faultA), B: l.disk(1, l.file(c.b, false), ""), Strict: c.strict}
			r.Say = func(s string) { said = append(said, s) }
			outcome, err := r.Run(context.Background())
			if outcome != c.outcome || strings.Join(said, "|") != c.want {
				t.Errorf("outcome %d, %q, want %d, %q", outcome, said, c.outcome, c.want)
			}
			if (c.errorMention != "") != (err != nil) || err != nil && !strings.HasPrefix(err.Error(), c.errorMention) {
				t.Errorf("error is %v, want %q", err, c.errorMention)
			}
		})
	}
}

// Each read that fails is told, wherever it is.
func TestCompareTellsEveryFailure(t *testing.T) {
	data := patchwork(13, 4<<20)
	for n := range 40 {
		l := newLab(t)
		faults := fmt.Sprintf("read after=%d count=1 error=EIO", n)
		r := Compare{A: l.disk(0, l.file(data, true), ""), B: l.disk(1, l.file(data, true), faults), Say: func(string) {}}
		outcome, err := r.Run(context.Background())
		if err == nil && outcome == CompareSame {
			if n == 0 {
				t.Error("nothing fails")
			}
			return
		}
		if outcome != CompareReadFailed {
			t.Fatalf("number %d: outcome %d, %v", n, outcome, err)
		}
	}
}
