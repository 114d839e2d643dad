// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Names of the files of a list within its directory.
const (
	imageName = "image.qcow2"
	dataName  = "data.raw"
	modelName = "model.raw"
)

func backingName(k int) string { return fmt.Sprintf("backing%d", k) }
func otherName(k int) string   { return fmt.Sprintf("other%d", k) }

// patience is far beyond what one process takes here.
const patience = 2 * time.Minute

// command runs a program in dir. What it says is in the error when it fails; its status survives in the error. While a
// lock is held it is tried again: see unlocked.
func command(dir, name string, args ...string) (string, error) {
	for tries := 0; ; tries++ {
		out, err := once(dir, name, args...)
		if err == nil || tries == 30 || !strings.Contains(err.Error(), " lock\n") {
			return out, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func once(dir, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = dir
	var out, complaint bytes.Buffer
	c.Stdout, c.Stderr = &out, &complaint
	if err := c.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, complaint.String(), out.String())
	}
	return out.String(), nil
}

func qemuImg(dir string, args ...string) error {
	_, err := command(dir, "qemu-img", args...)
	return err
}

// status is the exit status in an error of command; -1 for another error.
func status(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	return -1
}

// writeSources puts the sources where qemu-io reads them.
func writeSources(dir string) error {
	for i, s := range sources {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("s%d", i)), s, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// bed is where a list is done: a directory beside that of the sources, or memory.
type bed struct {
	root, dir string
	l         *List
	tool      string            // what does verbs: qemu-img, or ours
	memory    map[string][]byte // the image and its data file; nil where they are files
}

// newBed describes a bed. Nothing is made yet.
func newBed(root string, l *List) *bed { return &bed{root: root, l: l, tool: "qemu-img"} }

// verb runs the tool in the bed.
func (b *bed) verb(args ...string) error {
	_, err := command(b.dir, b.tool, args...)
	return err
}

// prepare makes the directory and all files below the image.
func (b *bed) prepare() (err error) {
	if b.dir != "" || b.memory != nil {
		return nil
	}
	if b.dir, err = os.MkdirTemp(b.root, "list-"); err != nil {
		return err
	}
	l := b.l
	for k := len(l.Backing) - 1; k >= 0; k-- {
		below := Base{}
		if k+1 < len(l.Backing) {
			below = l.Backing[k+1]
		}
		if err := b.base(backingName(k), l.Backing[k], backingName(k+1), below.Format); err != nil {
			return err
		}
	}
	for k, o := range l.Others {
		if err := b.base(otherName(k), o, "", ""); err != nil {
			return err
		}
	}
	return nil
}

// load gives the bytes of the image or its data file.
func (b *bed) load(name string) ([]byte, error) {
	if b.memory != nil {
		return slices.Clone(b.memory[name]), nil
	}
	return os.ReadFile(b.path(name))
}

// store puts them there.
func (b *bed) store(name string, file []byte) error {
	if b.memory != nil {
		b.memory[name] = file
		return nil
	}
	return os.WriteFile(b.path(name), file, 0o600)
}

func (b *bed) path(name string) string { return filepath.Join(b.dir, name) }

func (b *bed) remove() error {
	if b.dir == "" {
		return nil
	}
	return os.RemoveAll(b.dir)
}

// base makes a file that stands below, or might.
func (b *bed) base(name string, o Base, below, belowFormat string) error {
	if o.Format == "raw" || o.Compressed {
		raw := name
		if o.Compressed {
			raw = name + ".raw"
		}
		c := over(o, nil)
		if err := writeSparse(b.path(raw), c.data); err != nil || o.Format == "raw" {
			return err
		}
		return b.verb("convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", fmt.Sprintf("cluster_size=%d", o.Cluster), raw, name)
	}
	args := []string{"create", "-q", "-f", "qcow2", "-o", fmt.Sprintf("cluster_size=%d", o.Cluster)}
	if belowFormat != "" {
		args = append(args, "-b", below, "-F", belowFormat)
	}
	if err := b.verb(append(args, name, fmt.Sprint(o.Size))...); err != nil {
		return err
	}
	var lines []string
	for _, p := range pieces(o) {
		lines = append(lines, fmt.Sprintf("write -q -s ../s%d %d %d", p.source, p.off, p.len))
	}
	return b.qemuIO(name, lines)
}

// writeSparse writes a raw file with holes where the content is zero.
func writeSparse(path string, data []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	const step = 4096
	for at := 0; at < len(data); at += step {
		part := data[at:min(at+step, len(data))]
		if len(bytes.TrimLeft(part, "\x00")) > 0 {
			if _, err := f.WriteAt(part, int64(at)); err != nil {
				return errors.Join(err, f.Close())
			}
		}
	}
	return errors.Join(f.Truncate(int64(len(data))), f.Close())
}

func (b *bed) qemuIO(name string, lines []string) error {
	if len(lines) == 0 {
		return nil
	}
	args := []string{"-f", "qcow2", "-d", "unmap"}
	for _, l := range lines {
		args = append(args, "-c", l)
	}
	_, err := command(b.dir, "qemu-io", append(args, name)...)
	return err
}

// createArgs is what makes the image of the list, for qemu-img and for what answers as it would.
func (b *bed) createArgs() []string {
	i := &b.l.Image
	o := []string{fmt.Sprintf("cluster_size=%d", i.Cluster), "compat=" + i.Compat, fmt.Sprintf("refcount_bits=%d", i.Refcount)}
	if i.ExtL2 {
		o = append(o, "extended_l2=on")
	}
	if i.Lazy {
		o = append(o, "lazy_refcounts=on")
	}
	if i.Prealloc != "" {
		o = append(o, "preallocation="+i.Prealloc)
	}
	if i.Compression != "" {
		o = append(o, "compression_type="+i.Compression)
	}
	switch b.l.Data {
	case "raw":
		o = append(o, "data_file="+dataName, "data_file_raw=on")
	case "plain":
		o = append(o, "data_file="+dataName)
	}
	args := []string{"create", "-q", "-f", "qcow2", "-o", strings.Join(o, ",")}
	if len(b.l.Backing) > 0 {
		args = append(args, "-b", backingName(0), "-F", b.l.Backing[0].Format)
	}
	return append(args, imageName, fmt.Sprint(i.Size))
}

// theirLine is the operation in the language of qemu-io, if it has it.
func theirLine(o *Op) (string, bool) {
	switch o.Kind {
	case Write:
		return fmt.Sprintf("write -q -s ../s%d %d %d", o.Source, o.Off, o.Len), true
	case Compressed:
		return fmt.Sprintf("write -q -c -s ../s%d %d %d", o.Source, o.Off, o.Len), true
	case Zero:
		how := ""
		if o.Unmap {
			how = "-u "
		}
		return fmt.Sprintf("write -q -z %s%d %d", how, o.Off, o.Len), true
	case Discard, Read:
		return fmt.Sprintf("%s -q %d %d", o.Kind, o.Off, o.Len), true
	case Flush:
		return "flush", true
	case Resize:
		return fmt.Sprintf("truncate %d", o.Len), true
	}
	return "", false
}

// verbArgs is the operation as a verb of qemu-img.
func (b *bed) verbArgs(o *Op) []string {
	switch o.Kind {
	case Snapshot:
		return []string{"snapshot", "-q", map[string]string{"create": "-c", "apply": "-a", "delete": "-d"}[o.Verb], o.Name, imageName}
	case Resize:
		return []string{"resize", "-q", "--shrink", "-f", "qcow2", imageName, fmt.Sprint(o.Len)}
	case Commit:
		return []string{"commit", "-q", "-f", "qcow2", imageName}
	case Rebase:
		if o.Target < 0 {
			return []string{"rebase", "-q", "-f", "qcow2", "-b", "", imageName}
		}
		return []string{"rebase", "-q", "-f", "qcow2", "-b", otherName(o.Target), "-F", b.l.Others[o.Target].Format, imageName}
	}
	return nil
}

// theirs makes the image and does the list with the peer's tools, one after the other, with as few processes as it takes.
func (b *bed) theirs() error {
	if err := b.make(); err != nil {
		return err
	}
	var lines []string
	for k, o := range b.l.Ops {
		// Their compressed writes go on filling a cluster that was given away meanwhile: only a new process forgets it.
		anew := k > 0 && o.Kind == Compressed && b.l.Ops[k-1].Kind != Compressed
		line, ok := theirLine(&o)
		ok = ok && (o.Kind != Resize || b.tool == "qemu-img")
		if ok && !anew {
			lines = append(lines, line)
			continue
		}
		if err := b.qemuIO(imageName, lines); err != nil {
			return err
		}
		lines = nil
		if ok {
			lines = append(lines, line)
			continue
		}
		if o.Kind == Reopen {
			continue
		}
		if err := b.verb(b.verbArgs(&o)...); err != nil {
			return err
		}
	}
	return b.qemuIO(imageName, lines)
}

// check asks the peer whether the image is consistent.
func (b *bed) check(name string) error { return qemuImg(b.dir, "check", "-q", "-f", "qcow2", name) }

// content reads a disk with the peer's tool.
func (b *bed) content(name, format string) ([]byte, error) {
	out := name + ".out"
	defer func() { _ = os.Remove(b.path(out)) }()
	if err := qemuImg(b.dir, "convert", "-q", "-f", format, "-O", "raw", name, out); err != nil {
		return nil, err
	}
	return os.ReadFile(b.path(out))
}

// holds compares a disk, read by the peer's tool, with what it should hold.
func (b *bed) holds(name, format string, want *content) error {
	got, err := b.content(name, format)
	if err != nil {
		return err
	}
	if len(got) != len(want.data) {
		return fmt.Errorf("%s has %d bytes, want %d", name, len(got), len(want.data))
	}
	if err := want.compare(0, got); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// naive reads the image as it is now, with the content below it as the model has it.
func (b *bed) naive(m *model) (*naive, error) {
	file, err := b.load(imageName)
	if err != nil {
		return nil, err
	}
	var data, below []byte
	if b.l.Data != "" {
		if data, err = b.load(dataName); err != nil {
			return nil, err
		}
	}
	if m.backing != nil {
		below = m.backing.data
	}
	return openNaive(file, data, below)
}

// judgeNaively compares content, snapshots and consistency by the plain reader.
func (b *bed) judgeNaively(m *model) error {
	n, err := b.naive(m)
	if err != nil {
		return err
	}
	if v := n.check(); len(v.errors)+len(v.copied)+len(v.leaks)+len(v.ghosts) > 0 {
		return fmt.Errorf("not consistent:\n%s", &v)
	}
	if n.size != int64(len(m.data)) || len(n.snapshots) != len(m.snapshots) {
		return fmt.Errorf("image has %d bytes and %d snapshots, want %d and %d", n.size, len(n.snapshots), len(m.data), len(m.snapshots))
	}
	got, err := n.content(n.l1Offset, n.l1Size, n.size)
	if err == nil {
		err = m.compare(0, got)
	}
	if err != nil {
		return fmt.Errorf("read plainly: %w", err)
	}
	for _, s := range n.snapshots {
		want := m.snapshots[s.name]
		got, err := n.content(s.l1Offset, s.l1Size, int64(len(want.data)))
		if err == nil {
			err = want.compare(0, got)
		}
		if err != nil {
			return fmt.Errorf("snapshot %s of %d bytes, read plainly: %w", s.name, s.size, err)
		}
	}
	return nil
}

// judge compares all that is there with the model, by the peer's tools alone: content, files below, snapshots, check.
func (b *bed) judge(m *model) error {
	if err := b.judgeNaively(m); err != nil || b.memory != nil {
		return err
	}
	if err := b.check(imageName); err != nil {
		return err
	}
	if err := b.holds(imageName, "qcow2", &m.content); err != nil {
		return err
	}
	if err := b.judgeBelow(m); err != nil {
		return err
	}
	for name, want := range m.snapshots {
		if err := b.verb("snapshot", "-q", "-a", name, imageName); err != nil {
			return err
		}
		if err := b.holds(imageName, "qcow2", &want); err != nil {
			return fmt.Errorf("snapshot %s: %w", name, err)
		}
	}
	if len(m.snapshots) > 0 {
		return b.check(imageName)
	}
	return nil
}

// judgeBelow compares the file that stands below now, if it is still the first one.
func (b *bed) judgeBelow(m *model) error {
	changed := false
	for _, o := range b.l.Ops {
		if o.Kind == Rebase {
			return nil
		}
		changed = changed || o.Kind == Commit
	}
	if !changed {
		return nil
	}
	return b.holds(backingName(0), b.l.Backing[0].Format, m.backing)
}
