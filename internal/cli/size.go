// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"math"
	"math/big"
	"strings"
)

// sizeSuffixes stand in the order of their powers of 1024. Upper and lower case mean the same, as they do for qemu-img.
const sizeSuffixes = "KMGTPE"

// parseSize reads a number of bytes: decimal digits, perhaps with a fraction, and one of K, M, G, T, P, E or KiB, MiB, ...
// (powers of 1024), or B or nothing for bytes. The result is a whole number of bytes, 0 to 2^63-1.
func parseSize(s string) (int64, error) {
	digits := strings.TrimRight(s, "BbiKkMmGgTtPpEe")
	shift, ok := sizeShift(s[len(digits):])
	switch {
	case !ok && strings.HasSuffix(strings.ToUpper(s), "B"):
		return 0, fmt.Errorf("size %q: suffix %q is ambiguous (K or KiB is 1024 bytes)", s, s[len(digits):])
	case !ok || !isDecimal(digits):
		return 0, fmt.Errorf("size %q is not a number with an optional suffix of K, M, G, T, P or E (such as 512, 64K, 1.5GiB)", s)
	}
	v, ok := new(big.Rat).SetString(digits)
	if !ok {
		return 0, fmt.Errorf("size %q is not a number", s)
	}
	v.Mul(v, new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), shift)))
	if !v.IsInt() {
		return 0, fmt.Errorf("size %q is not a whole number of bytes", s)
	}
	if !v.Num().IsInt64() {
		return 0, fmt.Errorf("size %q is too large (at most %d bytes)", s, int64(math.MaxInt64))
	}
	return v.Num().Int64(), nil
}

// sizeShift is the power of two that a suffix stands for.
func sizeShift(suffix string) (uint, bool) {
	u := strings.ToUpper(suffix)
	if u == "" || u == "B" {
		return 0, true
	}
	i := strings.IndexByte(sizeSuffixes, u[0])
	if i < 0 || (len(u) > 1 && u[1:] != "IB") {
		return 0, false
	}
	return uint(10 * (i + 1)), true
}

// isDecimal accepts digits with at most one point among them, few enough that no text can make the arithmetic slow.
func isDecimal(s string) bool {
	const digitsMax = 40 // 2^63 has 19, and a fraction that is whole bytes at E has at most 60 binary and 20 useful places
	if s == "" || len(s) > digitsMax || s[0] == '.' || s[len(s)-1] == '.' {
		return false
	}
	points := 0
	for _, c := range []byte(s) {
		switch {
		case c == '.':
			points++
		case c < '0' || c > '9':
			return false
		}
	}
	return points <= 1
}

// formatSize writes a number of bytes as a person would: in the largest unit that gives a short number.
func formatSize(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n), -1
	for v >= 1024 && i+1 < len(sizeSuffixes) {
		v /= 1024
		i++
	}
	s := strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0")
	return fmt.Sprintf("%s %ciB", s, sizeSuffixes[i])
}
