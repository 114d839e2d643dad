// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// Errors of ParseSize.
var (
	ErrSizeForm  = errors.New("not a size")
	ErrSizeRange = errors.New("size out of range")
)

// ParseSize reads a size as qemu-img does: decimal digits, perhaps with a fraction when a suffix makes it bytes, and one
// of b, k, M, G, T, P, E (upper or lower case, powers of 1024); or hexadecimal with 0x and no suffix. What is less than a
// byte is cut off. The result is 0 to 2^64-1; beyond is ErrSizeRange.
func ParseSize(s string) (uint64, error) {
	s = strings.TrimLeft(s, " \t\n")
	if h, ok := cutHex(s); ok {
		return parseHex(h)
	}
	s = strings.TrimPrefix(s, "+")
	digits, shift, suffixed := s, uint(0), false
	if n := len(s); n > 0 {
		if i := strings.IndexByte("BKMGTPE", s[n-1]&^0x20); i >= 0 {
			digits, shift, suffixed = s[:n-1], uint(10*i), true
		}
	}
	whole, fraction, point := strings.Cut(digits, ".")
	if !isDigits(whole) || point && fraction != "" && !isDigits(fraction) || len(digits) > sizeDigitsMax {
		return 0, ErrSizeForm
	}
	if strings.Trim(fraction, "0") != "" && (!suffixed || shift == 0) {
		return 0, ErrSizeForm // a part of a byte
	}
	v, ok := new(big.Rat).SetString(strings.TrimSuffix(digits, "."))
	if !ok {
		return 0, ErrSizeForm
	}
	v.Mul(v, new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), shift)))
	n := new(big.Int).Quo(v.Num(), v.Denom())
	if !n.IsUint64() {
		return 0, ErrSizeRange
	}
	return n.Uint64(), nil
}

// sizeDigitsMax keeps a hostile text from making the arithmetic slow; 2^64 has 20 digits.
const sizeDigitsMax = 64

// ParseImageSize is ParseSize for what has to be a length of an image: 0 to 2^63-1.
func ParseImageSize(s string) (int64, error) {
	n, err := ParseSize(s)
	if err == nil && n > math.MaxInt64 {
		return 0, ErrSizeRange
	}
	return int64(n), err
}

func cutHex(s string) (string, bool) {
	if h, ok := strings.CutPrefix(s, "0x"); ok {
		return h, true
	}
	return strings.CutPrefix(s, "0X")
}

func parseHex(h string) (uint64, error) {
	n, err := strconv.ParseUint(h, 16, 64)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return 0, ErrSizeRange
	case err != nil:
		return 0, ErrSizeForm
	}
	return n, nil
}

func isDigits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

// FormatSize writes a number of bytes with three significant digits, in the first unit of which it is less than 1000.
func FormatSize(n int64) string {
	units := [...]string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	v, i := float64(n), 0
	for v >= 1000 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return strconv.FormatFloat(v, 'g', 3, 64) + " " + units[i]
}
