// SPDX-License-Identifier: Apache-2.0

package sparse

// Kind tells what stands behind a range of the disk.
type Kind uint8

const (
	// Hole was never written and reads as zeros.
	Hole Kind = iota
	// Zero was made to read as zeros.
	Zero
	// Data lies in the file as it is.
	Data
	// Deflate lies in the file as a compressed grain.
	Deflate
)

// String is the kind's name in messages.
func (k Kind) String() string {
	names := [...]string{"hole", "zero", "data", "deflate"}
	if int(k) < len(names) {
		return names[k]
	}
	return "unknown"
}

// Extent is a range of the disk of one kind. All are bytes.
type Extent struct {
	Kind           Kind
	Offset, Length int64 // of the disk
	// Host is where byte Offset lies in the file (Data), or where the grain begins that holds it (Deflate).
	Host int64
	// Room is how much of the file the grain can take at most, with what stands before it (Deflate).
	Room int64
}

// Map tells where a disk lies in its file.
type Map interface {
	// Lookup gives the extent that begins at off, cut to n bytes. off lies inside the disk, n is above 0 and reaches not
	// beyond the end of the disk. It waits for nothing and allocates nothing. A Deflate extent ends with its grain.
	Lookup(off, n int64) Extent
}

// Linear is the map of a disk that lies in its file from the offset on, byte for byte.
type Linear int64

// Lookup implements Map.
func (l Linear) Lookup(off, n int64) Extent {
	return Extent{Kind: Data, Offset: off, Length: n, Host: int64(l) + off}
}
