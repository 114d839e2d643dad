// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"encoding/binary"
	"slices"
)

// Types of header extensions (section Header extensions).
const (
	ExtensionEnd           uint32 = 0
	ExtensionBackingFormat uint32 = 0xe2792aca
	ExtensionFeatureNames  uint32 = 0x6803f857
	ExtensionBitmaps       uint32 = 0x23852875
	ExtensionEncryption    uint32 = 0x0537be77
	ExtensionDataFile      uint32 = 0x44415441
)

// Extension is one header extension as it lies in the image.
type Extension struct {
	Type uint32
	Data []byte
}

// parseExtensions reads the extensions of b from at on, to the end marker or the end of b.
func parseExtensions(b []byte, at int) ([]Extension, error) {
	var all []Extension
	for at+8 <= len(b) {
		kind, n := binary.BigEndian.Uint32(b[at:]), binary.BigEndian.Uint32(b[at+4:])
		if kind == ExtensionEnd {
			break
		}
		start := at + 8
		if uint64(n) > uint64(len(b)-start) {
			return nil, invalidf("header extension %#x reaches beyond its area (%d bytes at %#x)", kind, n, start)
		}
		all = append(all, Extension{Type: kind, Data: append([]byte(nil), b[start:start+int(n)]...)})
		at = start + (int(n)+7)&^7
	}
	return all, nil
}

// encodeExtensions writes all and the end marker to b from at on, and tells where it ended.
func encodeExtensions(b []byte, at int, all []Extension) (int, error) {
	for _, e := range all {
		n := 8 + (len(e.Data)+7)&^7
		if n > len(b)-at {
			return 0, invalidf("header extensions do not fit in the first cluster (%d bytes)", len(b))
		}
		binary.BigEndian.PutUint32(b[at:], e.Type)
		binary.BigEndian.PutUint32(b[at+4:], uint32(len(e.Data)))
		copy(b[at+8:], e.Data)
		at += n
	}
	if len(b)-at >= 8 {
		return at + 8, nil // the end marker: zeros
	}
	return at, nil // the area ends with the cluster
}

// Extension gives the data of the extension of this type; the last one counts when there are several. The bytes are the
// header's own.
func (h *Header) Extension(kind uint32) ([]byte, bool) {
	for i := len(h.Extensions) - 1; i >= 0; i-- {
		if h.Extensions[i].Type == kind {
			return h.Extensions[i].Data, true
		}
	}
	return nil, false
}

// SetExtension puts data in the place of the extension of this type; when there is none, before those that other programs
// write behind it. nil removes it. It takes ownership of data.
func (h *Header) SetExtension(kind uint32, data []byte) {
	var kept []Extension
	placed := data == nil
	for _, e := range h.Extensions {
		switch {
		case e.Type != kind:
			kept = append(kept, e)
		case !placed:
			kept = append(kept, Extension{Type: kind, Data: data})
			placed = true
		}
	}
	if !placed {
		at := slices.IndexFunc(kept, func(e Extension) bool { return extensionRank(e.Type) > extensionRank(kind) })
		if at < 0 {
			at = len(kept)
		}
		kept = slices.Insert(kept, at, Extension{Type: kind, Data: data})
	}
	h.Extensions = kept
}

// extensionOrder is how other programs order what they know. What they do not know comes last.
var extensionOrder = []uint32{ExtensionBackingFormat, ExtensionDataFile, ExtensionEncryption, ExtensionFeatureNames, ExtensionBitmaps}

func extensionRank(kind uint32) int {
	if at := slices.Index(extensionOrder, kind); at >= 0 {
		return at
	}
	return len(extensionOrder)
}

// BackingFormat is the name of the backing file's format, "" when the image does not say.
func (h *Header) BackingFormat() string { return h.stringExtension(ExtensionBackingFormat) }

// SetBackingFormat changes it; "" removes it.
func (h *Header) SetBackingFormat(s string) { h.setStringExtension(ExtensionBackingFormat, s) }

// DataFile is the name of the external data file as the image has it, "" when it does not say.
func (h *Header) DataFile() string { return h.stringExtension(ExtensionDataFile) }

// SetDataFile changes it; "" removes it. The feature bit is not touched.
func (h *Header) SetDataFile(s string) { h.setStringExtension(ExtensionDataFile, s) }

func (h *Header) stringExtension(kind uint32) string {
	data, _ := h.Extension(kind)
	return string(data)
}

func (h *Header) setStringExtension(kind uint32, s string) {
	if s == "" {
		h.SetExtension(kind, nil)
		return
	}
	h.SetExtension(kind, []byte(s))
}

// FeatureType tells which bit mask a feature name belongs to.
type FeatureType uint8

const (
	FeatureIncompatible FeatureType = 0
	FeatureCompatible   FeatureType = 1
	FeatureAutoclear    FeatureType = 2
)

// FeatureName is an entry of the feature-name table (section Feature name table).
type FeatureName struct {
	Type FeatureType
	Bit  uint8  // 0 to 63
	Name string // at most 46 bytes
}

const featureNameSize = 48

// FeatureNames is the image's table of feature names. Entries of unknown type or bit are left out; the last one may be cut
// short.
func (h *Header) FeatureNames() []FeatureName {
	data, _ := h.Extension(ExtensionFeatureNames)
	var names []FeatureName
	for ; len(data) > 2; data = data[min(featureNameSize, len(data)):] {
		name := data[2:min(featureNameSize, len(data))]
		if n := bytes.IndexByte(name, 0); n >= 0 {
			name = name[:n]
		}
		if data[0] <= uint8(FeatureAutoclear) && data[1] < 64 {
			names = append(names, FeatureName{FeatureType(data[0]), data[1], string(name)})
		}
	}
	return names
}

// SetFeatureNames changes the table; longer names are cut.
func (h *Header) SetFeatureNames(names []FeatureName) {
	data := make([]byte, len(names)*featureNameSize)
	for i, n := range names {
		e := data[i*featureNameSize:][:featureNameSize]
		e[0], e[1] = uint8(n.Type), n.Bit
		copy(e[2:], n.Name)
	}
	h.SetExtension(ExtensionFeatureNames, data)
}

// KnownFeatures are the features that this package knows, by the names that other programs give them.
func KnownFeatures() []FeatureName {
	return []FeatureName{
		{FeatureIncompatible, 0, "dirty bit"},
		{FeatureIncompatible, 1, "corrupt bit"},
		{FeatureIncompatible, 2, "external data file"},
		{FeatureIncompatible, 3, "compression type"},
		{FeatureIncompatible, 4, "extended L2 entries"},
		{FeatureCompatible, 0, "lazy refcounts"},
		{FeatureAutoclear, 0, "bitmaps"},
		{FeatureAutoclear, 1, "raw external data"},
	}
}

// Encryption tells where the header of the full disk encryption lies and how long it is, in bytes. It is false when the
// image has none, and an error when the place is not sound.
func (h *Header) Encryption() (off, length int64, ok bool, err error) {
	data, ok := h.Extension(ExtensionEncryption)
	if !ok {
		return 0, 0, false, nil
	}
	if len(data) != 16 {
		return 0, 0, false, invalidf("encryption extension has %d bytes (16 are right)", len(data))
	}
	o, n := binary.BigEndian.Uint64(data), binary.BigEndian.Uint64(data[8:])
	if o&(uint64(1)<<h.ClusterBits-1) != 0 || o >= uint64(MaxHostOffset) || n > uint64(MaxHostOffset)-o {
		return 0, 0, false, invalidf("encryption header lies at no possible place (%#x bytes at %#x)", n, o)
	}
	return int64(o), int64(n), true, nil
}
