// SPDX-License-Identifier: Apache-2.0

package img

import "slices"

// Names of the formats that can be written.
const (
	FormatRaw   = "raw"
	FormatQcow2 = "qcow2"
)

// foreignNames are the formats that are only read.
var foreignNames = []string{"vdi", "vhdx", "vmdk", "vpc"}

// FormatNames are the names of all formats, sorted.
func FormatNames() []string {
	return slices.Sorted(slices.Values(append([]string{FormatRaw, FormatQcow2}, foreignNames...)))
}

// KnownFormat tells whether an image can have this format.
func KnownFormat(name string) bool { return slices.Contains(FormatNames(), name) }

// absent are formats and drivers that qemu-img has and this tool has not. An image may name them for its backing file.
var absent = []string{"bochs", "cloop", "dmg", "file", "host_cdrom", "host_device", "luks", "nbd", "parallels", "qcow", "qed", "vvfat"}

// NamedFormat tells whether there is such a format, be it supported here or not.
func NamedFormat(name string) bool { return KnownFormat(name) || slices.Contains(absent, name) }
