// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// List is an image and what is done to it. As text it is one line for each thing, so that a list that failed can be kept,
// read, edited and run again:
//
//	image size=1048576 cluster=4096 compat=1.1 refcount=16 by=theirs seed=1 extl2 lazy overlap prealloc=metadata compression=zstd
//	data raw                        an external data file, "raw" or "plain"
//	backing raw size=524288 fill=7  the file below; a second such line is the one below that, and so on
//	other qcow2 size=262144 cluster=65536 fill=8 compressed
//	                                a file to rebase to
//	write 512 1024 s3               bytes from the beginning of source 3
//	& zero 4096 512 unmap           "&" is at the same time as the line before; if they touch the same bytes, only where the
//	                                image says "overlap": nobody knows then what these hold
//	discard 0 65536
//	read 0 512
//	compressed 0 4096 s1            whole clusters, as tools write them
//	flush
//	reopen
//	resize 2097152
//	snapshot create a               or apply, or delete
//	commit                          into the file below
//	rebase 0                        to the other file 0, or "rebase none"; the content stays
type List struct {
	Image   Image
	Data    string // "", "plain" or "raw"
	Backing []Base // the nearest first
	Others  []Base
	Ops     []Op
}

// Image is how the image is made.
type Image struct {
	Size, Cluster int64
	Compat        string // "0.10" or "1.1"
	Refcount      int    // bits
	ExtL2, Lazy   bool
	Prealloc      string // "" is off
	Compression   string // "" is zlib
	By            string // "ours" or "theirs"
	Overlap       bool   // operations at the same time may touch the same bytes
	Seed          uint64 // of what is chosen while the list is done: sizes of caches, interleavings
}

// v3 tells whether the image has the features of version 3.
func (i *Image) v3() bool { return i.Compat != "0.10" }

// Base is a file below, or one that may come there.
type Base struct {
	Format     string // "raw" or "qcow2"
	Size       int64
	Cluster    int64 // of a qcow2
	Compressed bool
	Fill       uint64 // what it holds
}

// Kind is what an operation does.
type Kind string

// The kinds of operations, as they stand in a list.
const (
	Write      Kind = "write"
	Compressed Kind = "compressed"
	Zero       Kind = "zero"
	Discard    Kind = "discard"
	Read       Kind = "read"
	Flush      Kind = "flush"
	Reopen     Kind = "reopen"
	Resize     Kind = "resize"
	Snapshot   Kind = "snapshot"
	Commit     Kind = "commit"
	Rebase     Kind = "rebase"
)

// Op is one operation.
type Op struct {
	Kind   Kind
	With   bool // at the same time as the one before
	Off    int64
	Len    int64 // the new size for Resize
	Source int
	Unmap  bool
	Verb   string // of a snapshot
	Name   string // of a snapshot
	Target int    // of Rebase: index of the other file, -1 for none
}

// ranged tells whether the operation has an offset and a length.
func (o *Op) ranged() bool {
	return slices.Contains([]Kind{Write, Compressed, Zero, Discard, Read}, o.Kind)
}

// io tells whether the operation is a request of a guest.
func (o *Op) io() bool { return o.ranged() && o.Kind != Compressed || o.Kind == Flush }

func (o *Op) overlaps(p *Op) bool {
	return o.ranged() && p.ranged() && o.Off < p.Off+p.Len && p.Off < o.Off+o.Len
}

// batches cuts the list into operations that are done at the same time.
func (l *List) batches() [][]Op {
	var all [][]Op
	for _, o := range l.Ops {
		last := len(all) - 1
		joins := o.With && o.io() && last >= 0 && all[last][0].io() &&
			(l.Image.Overlap || !slices.ContainsFunc(all[last], func(p Op) bool { return o.overlaps(&p) }))
		if joins {
			all[last] = append(all[last], o)
		} else {
			all = append(all, []Op{o})
		}
	}
	return all
}

// String is the line of the operation.
func (o Op) String() string {
	s := string(o.Kind)
	if o.With {
		s = "& " + s
	}
	switch {
	case o.Kind == Write || o.Kind == Compressed:
		return fmt.Sprintf("%s %d %d s%d", s, o.Off, o.Len, o.Source)
	case o.Kind == Zero && o.Unmap:
		return fmt.Sprintf("%s %d %d unmap", s, o.Off, o.Len)
	case o.ranged():
		return fmt.Sprintf("%s %d %d", s, o.Off, o.Len)
	case o.Kind == Resize:
		return fmt.Sprintf("%s %d", s, o.Len)
	case o.Kind == Snapshot:
		return fmt.Sprintf("%s %s %s", s, o.Verb, o.Name)
	case o.Kind == Rebase && o.Target < 0:
		return s + " none"
	case o.Kind == Rebase:
		return fmt.Sprintf("%s %d", s, o.Target)
	}
	return s
}

func (b Base) String() string {
	s := fmt.Sprintf("%s size=%d fill=%d", b.Format, b.Size, b.Fill)
	if b.Format == "qcow2" {
		s += fmt.Sprintf(" cluster=%d", b.Cluster)
	}
	if b.Compressed {
		s += " compressed"
	}
	return s
}

func (i Image) String() string {
	s := fmt.Sprintf("size=%d cluster=%d compat=%s refcount=%d by=%s seed=%d", i.Size, i.Cluster, i.Compat, i.Refcount, i.By, i.Seed)
	if i.ExtL2 {
		s += " extl2"
	}
	if i.Lazy {
		s += " lazy"
	}
	if i.Overlap {
		s += " overlap"
	}
	if i.Prealloc != "" {
		s += " prealloc=" + i.Prealloc
	}
	if i.Compression != "" {
		s += " compression=" + i.Compression
	}
	return s
}

// String is the whole list as text.
func (l *List) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "image %s\n", l.Image)
	if l.Data != "" {
		fmt.Fprintf(&b, "data %s\n", l.Data)
	}
	for _, x := range l.Backing {
		fmt.Fprintf(&b, "backing %s\n", x)
	}
	for _, x := range l.Others {
		fmt.Fprintf(&b, "other %s\n", x)
	}
	for _, o := range l.Ops {
		fmt.Fprintln(&b, o)
	}
	return b.String()
}

// ParseList reads what String wrote. Lines that begin with "#" are comments.
func ParseList(text string) (*List, error) {
	l := new(List)
	for n, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		if words := strings.Fields(line); len(words) > 0 {
			if err := l.parse(words); err != nil {
				return nil, fmt.Errorf("line %d %q: %w", n+1, line, err)
			}
		}
	}
	if l.Image.Size == 0 || l.Image.Cluster == 0 {
		return nil, fmt.Errorf("list has no image line with size and cluster")
	}
	return l, nil
}

func (l *List) parse(words []string) error {
	switch words[0] {
	case "image":
		return l.Image.parse(words[1:])
	case "data":
		if len(words) != 2 {
			return fmt.Errorf("want \"data raw\" or \"data plain\"")
		}
		l.Data = words[1]
		return nil
	case "backing", "other":
		b, err := parseBase(words[1:])
		if words[0] == "other" {
			l.Others = append(l.Others, b)
		} else {
			l.Backing = append(l.Backing, b)
		}
		return err
	}
	o, err := parseOp(words)
	l.Ops = append(l.Ops, o)
	return err
}

// fields calls set for each key=value; a key alone has an empty value.
func fields(words []string, set func(key, value string, n int64) bool) error {
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		n, _ := strconv.ParseInt(value, 10, 64) // words have none; those that want a number are 0 without
		if !set(key, value, n) {
			return fmt.Errorf("unknown word %q", w)
		}
	}
	return nil
}

func (i *Image) parse(words []string) error {
	return fields(words, func(key, value string, n int64) bool {
		switch key {
		case "size":
			i.Size = n
		case "cluster":
			i.Cluster = n
		case "compat":
			i.Compat = value
		case "refcount":
			i.Refcount = int(n)
		case "seed":
			i.Seed = uint64(n)
		case "by":
			i.By = value
		case "extl2":
			i.ExtL2 = true
		case "overlap":
			i.Overlap = true
		case "lazy":
			i.Lazy = true
		case "prealloc":
			i.Prealloc = value
		case "compression":
			i.Compression = value
		default:
			return false
		}
		return true
	})
}

func parseBase(words []string) (Base, error) {
	var b Base
	if len(words) == 0 {
		return b, fmt.Errorf("want a format")
	}
	b.Format = words[0]
	return b, fields(words[1:], func(key, _ string, n int64) bool {
		switch key {
		case "size":
			b.Size = n
		case "cluster":
			b.Cluster = n
		case "fill":
			b.Fill = uint64(n)
		case "compressed":
			b.Compressed = true
		default:
			return false
		}
		return true
	})
}

func parseOp(words []string) (Op, error) {
	var o Op
	if words[0] == "&" {
		o.With, words = true, words[1:]
	}
	if len(words) == 0 {
		return o, fmt.Errorf("want an operation")
	}
	o.Kind = Kind(words[0])
	line := strings.Join(words[1:], " ")
	scan := func(format string, to ...any) (Op, error) {
		if _, err := fmt.Sscanf(line, format, to...); err != nil {
			return o, fmt.Errorf("want %q: %w", format, err)
		}
		return o, nil
	}
	switch o.Kind {
	case Write, Compressed:
		_, err := scan("%d %d s%d", &o.Off, &o.Len, &o.Source)
		return o, err
	case Zero, Discard, Read:
		o.Unmap = words[len(words)-1] == "unmap"
		_, err := scan("%d %d", &o.Off, &o.Len)
		return o, err
	case Resize:
		_, err := scan("%d", &o.Len)
		return o, err
	case Snapshot:
		_, err := scan("%s %s", &o.Verb, &o.Name)
		return o, err
	case Rebase:
		if line == "none" {
			o.Target = -1
			return o, nil
		}
		_, err := scan("%d", &o.Target)
		return o, err
	case Flush, Reopen, Commit:
		return o, nil
	}
	return o, fmt.Errorf("unknown operation %q", words[0])
}
