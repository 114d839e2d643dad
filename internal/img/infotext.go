// SPDX-License-Identifier: Apache-2.0

package img

import (
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"
)

// WriteText writes the information as people read it.
func (i *Info) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "image: %s\nfile format: %s\nvirtual size: %s (%d bytes)\ndisk size: %s\n",
		i.Filename, i.Format, FormatSize(i.VirtualSize), i.VirtualSize, FormatSize(i.ActualSize))
	if i.Encrypted {
		b.WriteString("encrypted: yes\n")
	}
	if i.ClusterSize != 0 {
		fmt.Fprintf(&b, "cluster_size: %d\n", i.ClusterSize)
	}
	if i.Dirty {
		b.WriteString("cleanly shut down: no\n")
	}
	i.writeBacking(&b)
	if len(i.Snapshots) > 0 {
		b.WriteString(SnapshotTable(i.Snapshots))
	}
	if i.Specific != nil {
		b.WriteString("Format specific information:\n")
		writeStruct(&b, reflect.ValueOf(i.Specific.Data), 1)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (i *Info) writeBacking(b *strings.Builder) {
	if i.BackingFilename == "" {
		return
	}
	fmt.Fprintf(b, "backing file: %s", i.BackingFilename)
	if i.FullBacking != i.BackingFilename {
		fmt.Fprintf(b, " (actual path: %s)", i.FullBacking)
	}
	b.WriteByte('\n')
	if i.BackingFormat != "" {
		fmt.Fprintf(b, "backing file format: %s\n", i.BackingFormat)
	}
}

// SnapshotTable lists internal snapshots, with a heading.
func SnapshotTable(all []SnapshotInfo) string {
	var b strings.Builder
	row := func(id, tag, size, date, clock, icount string) {
		fmt.Fprintf(&b, "%-9s %-16s %8s%20s%13s%11s\n", id, tag, size, date, clock, icount)
	}
	b.WriteString("Snapshot list:\n")
	row("ID", "TAG", "VM SIZE", "DATE", "VM CLOCK", "ICOUNT")
	for _, s := range all {
		icount := ""
		if s.ICount != nil {
			icount = fmt.Sprint(*s.ICount)
		}
		clock := fmt.Sprintf("%02d:%02d:%02d.%03d", s.VMClockSec/3600, s.VMClockSec/60%60, s.VMClockSec%60, s.VMClockNsec/1e6)
		row(s.ID, s.Name, FormatSize(s.VMStateSize), time.Unix(s.DateSec, 0).Format(time.DateTime), clock, icount)
	}
	return b.String()
}

// writeStruct writes the fields of what is specific to a format as "name: value" by their JSON names, with blanks for
// hyphens. Nil pointers and empty lists that may be left out are.
func writeStruct(b *strings.Builder, v reflect.Value, level int) {
	v = reflect.Indirect(v)
	for n := range v.NumField() {
		name, options, _ := strings.Cut(v.Type().Field(n).Tag.Get("json"), ",")
		if options == "omitempty" && v.Field(n).IsZero() {
			continue
		}
		indent(b, level)
		fmt.Fprintf(b, "%s:", strings.ReplaceAll(name, "-", " "))
		writeValue(b, v.Field(n), level)
	}
}

func writeValue(b *strings.Builder, v reflect.Value, level int) {
	v = reflect.Indirect(v)
	switch v.Kind() {
	case reflect.Slice:
		b.WriteByte('\n')
		for n := range v.Len() {
			indent(b, level+1)
			fmt.Fprintf(b, "[%d]:", n)
			writeValue(b, v.Index(n), level+1)
		}
	case reflect.Struct:
		b.WriteByte('\n')
		writeStruct(b, v, level+1)
	default:
		fmt.Fprintf(b, " %v\n", v.Interface())
	}
}

func indent(b *strings.Builder, level int) { b.WriteString(strings.Repeat("    ", level)) }
