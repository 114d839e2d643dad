// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"math/bits"
)

// zeroPiece is how much is compared with zeros at a time: it stays in the first cache.
const zeroPiece = 4 << 10

// zeroPage is what is written where zeros are to take space, and what data is compared with. The largest cluster is as long.
var zeroPage [2 << 20]byte

// allZero tells whether b has zeros only. Most of what has not begins with something else, or so does one of its words
// further on: bytes.Equal stops at the first one, and goes through zeros as fast as memory gives them.
func allZero(b []byte) bool {
	for len(b) > zeroPiece {
		if !bytes.Equal(b[:zeroPiece], zeroPage[:zeroPiece]) {
			return false
		}
		b = b[zeroPiece:]
	}
	return bytes.Equal(b, zeroPage[:len(b)])
}

// zeroRun tells how many bytes at the beginning of b, which lies at offset off of its disk, are alike: zeros, or not. Only
// runs of zeros of at least sparse bytes count as such; they begin and end at multiples of the unit, which is the power of
// two that sparse has in it, or with b.
func zeroRun(b []byte, off, sparse int64) (n int, zero bool) {
	unit := int64(1) << (bits.Len64(uint64(sparse)) - 1)
	zeros := leadingZeros(b, off, unit)
	if int64(zeros) >= sparse || zeros == len(b) {
		return zeros, true
	}
	for n = max(zeros, pieceLength(b, off, unit)); n < len(b); {
		zeros := leadingZeros(b[n:], off+int64(n), unit)
		if int64(zeros) >= sparse || zeros > 0 && n+zeros == len(b) {
			return n, false
		}
		n += max(zeros, pieceLength(b[n:], off+int64(n), unit))
	}
	return n, false
}

// leadingZeros is how many bytes at the beginning of b are zeros, in whole units.
func leadingZeros(b []byte, off, unit int64) (n int) {
	for n < len(b) {
		piece := pieceLength(b[n:], off+int64(n), unit)
		if !allZero(b[n : n+piece]) {
			return n
		}
		n += piece
	}
	return n
}

// pieceLength is how much of b lies in the unit that off lies in.
func pieceLength(b []byte, off, unit int64) int {
	return int(min(int64(len(b)), unit-off%unit))
}
