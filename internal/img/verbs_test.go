// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

// Each request that a verb makes to the file of an image fails, once and for ever. The verb must say so, and what it does
// not make must hold what it held: an image that was being filled is the only one that may be of no use.

const (
	verbDisk    = 1 << 20
	verbOptions = "cluster_size=4096"
)

// studio is a folder of images.
type studio struct {
	*testing.T
	dir string
}

func (s *studio) path(name string) string { return filepath.Join(s.dir, name) }

// image makes an image with these contents, and with a backing file if one is named.
func (s *studio) image(name, format, backing string, data []byte) {
	s.Helper()
	o := NewOptions(CreateOptions(format, true))
	set := func(key, value string) {
		if err := o.Set(key, value); err != nil {
			s.Fatal(err)
		}
	}
	set("size", strconv.Itoa(verbDisk))
	if format == FormatQcow2 {
		if err := o.Parse(verbOptions); err != nil {
			s.Fatal(err)
		}
	}
	if backing != "" {
		set("backing_file", backing)
		set("backing_fmt", map[bool]string{true: FormatRaw, false: FormatQcow2}[filepath.Ext(backing) == ".raw"])
	}
	if err := Create(s.path(name), format, o); err != nil {
		s.Fatal(err)
	}
	s.with(name, false, func(d *Disk) error {
		for at := 0; at < len(data); at += 4096 {
			if p := data[at : at+4096]; !allZero(p) {
				if err := d.Write(p, int64(at)); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// with opens an image and lends it.
func (s *studio) with(name string, readOnly bool, do func(d *Disk) error) {
	s.Helper()
	loops, err := StartLoops(1)
	if err != nil {
		s.Fatal(err)
	}
	defer loops.Stop()
	d, err := OpenDisk(context.Background(), loops.At(0), Source{Name: s.path(name), Format: formatOf(name), Store: StoreOptions{ReadOnly: readOnly}}, DiskOptions{})
	if err != nil {
		s.Fatal(err)
	}
	if err := closeAll(do(d), d); err != nil {
		s.Fatal(err)
	}
}

func formatOf(name string) string {
	if filepath.Ext(name) == ".raw" {
		return FormatRaw
	}
	return FormatQcow2
}

func (s *studio) content(name string) []byte {
	s.Helper()
	b := make([]byte, verbDisk)
	s.with(name, true, func(d *Disk) error { return d.Read(b, 0) })
	return b
}

// sound fails when an image has more wrong with it than leaks.
func (s *studio) sound(name string) {
	s.Helper()
	store, err := OpenStore(s.path(name), StoreOptions{ReadOnly: true})
	if err != nil {
		s.Fatal(err)
	}
	defer store.Close()
	r, err := check.Run(store, &check.Options{Report: func(f check.Finding) {
		if f.Kind != check.Leak {
			s.Errorf("%s: %s", name, f.Text)
		}
	}})
	if err != nil || r.Corruptions+r.CheckErrors > 0 {
		s.Errorf("%s: %d corruptions, %d errors, %v", name, r.Corruptions, r.CheckErrors, err)
	}
}

// copyOf is a studio with the same images.
func (s *studio) copyOf() *studio {
	s.Helper()
	c := &studio{s.T, s.TempDir()}
	if err := os.CopyFS(c.dir, os.DirFS(s.dir)); err != nil {
		s.Fatal(err)
	}
	return c
}

// failing runs a verb on copies of the images, with the n-th request to the file called name failing, for all n.
func (s *studio) failing(name string, verb func(c *studio) error, after func(c *studio, err error)) {
	s.Helper()
	defer func(old func(string) string) { faultsOf = old }(faultsOf)
	for _, count := range []string{"count=1", ""} {
		n := 0
		for ; n < 5000; n++ {
			c := s.copyOf()
			fault := fmt.Sprintf("any after=%d error=EIO %s", n, count)
			faultsOf = func(path string) string {
				if path == c.path(name) {
					return fault
				}
				return ""
			}
			err := verb(c)
			faultsOf = func(string) string { return "" }
			after(c, err)
			if s.Failed() {
				s.Fatalf("%s: %s: %v", name, fault, err)
			}
			if err == nil {
				break
			}
			n += n / 6 // far on, they are much alike
		}
		if n == 0 || n >= 5000 {
			s.Errorf("%s: %d requests failed, which cannot be", name, n)
		}
	}
}

func newStudio(t *testing.T) (*studio, []byte) {
	s := &studio{t, t.TempDir()}
	data := patchwork(21, verbDisk)
	s.image("base.qcow2", FormatQcow2, "", data)
	s.image("base.raw", FormatRaw, "", data)
	top := patchwork(22, verbDisk)
	clear(top[:verbDisk/2])
	for at := 0; at < verbDisk; at += 4096 {
		if !allZero(top[at : at+4096]) {
			copy(data[at:], top[at:at+4096])
		}
	}
	s.image("top.qcow2", FormatQcow2, "base.qcow2", top)
	s.image("overraw.qcow2", FormatQcow2, "base.raw", top)
	if got := s.content("top.qcow2"); !bytes.Equal(got, data) {
		t.Fatalf("the chain does not hold what was written, first at %d", firstDifference(got, data))
	}
	return s, data
}

func TestConvertTellsEveryFailureOfItsFiles(t *testing.T) {
	s, data := newStudio(t)
	for _, compress := range []bool{false, true} {
		verb := func(c *studio) error {
			r := ConvertRequest{
				Sources: []Source{{Name: c.path("top.qcow2"), Store: StoreOptions{ReadOnly: true}}},
				Target:  c.path("new.qcow2"), Format: FormatQcow2, Options: []string{verbOptions}, Sparse: SparseDefault, Workers: 3,
				Compress: compress, TargetCache: "writeback",
			}
			return r.Run(context.Background())
		}
		told := func(c *studio, err error) {
			if err == nil && !bytes.Equal(c.content("new.qcow2"), data) {
				c.Error("the target differs")
			}
			if err != nil && !errors.Is(err, syscall.EIO) {
				c.Errorf("%v is not the fault", err)
			}
		}
		s.failing("top.qcow2", verb, told)
		s.failing("new.qcow2", verb, told)
	}
}

func TestCommitLosesNothing(t *testing.T) {
	s, data := newStudio(t)
	for _, c := range []struct{ top, base string }{{"top.qcow2", "base.qcow2"}, {"overraw.qcow2", "base.raw"}} {
		verb := func(x *studio) error {
			r := CommitRequest{Source: Source{Name: x.path(c.top)}, Warnings: io.Discard}
			return r.Run(context.Background())
		}
		after := func(x *studio, err error) {
			if !bytes.Equal(x.content(c.top), data) {
				x.Error("the image does not show what it showed")
			}
			if err == nil && !bytes.Equal(x.content(c.base), data) {
				x.Error("the base does not hold what was committed")
			}
			x.sound(c.top)
			if formatOf(c.base) == FormatQcow2 {
				x.sound(c.base)
			}
		}
		s.failing(c.top, verb, after)
		s.failing(c.base, verb, after)
	}
}

func TestRebaseLosesNothing(t *testing.T) {
	s, data := newStudio(t)
	s.image("other.qcow2", FormatQcow2, "", patchwork(23, verbDisk))
	for _, backing := range []string{"other.qcow2", "base.raw", ""} {
		verb := func(x *studio) error {
			r := RebaseRequest{Source: Source{Name: x.path("top.qcow2")}, Backing: backing, Warnings: io.Discard}
			if backing != "" {
				r.BackingFormat = formatOf(backing)
			}
			return r.Run(context.Background())
		}
		after := func(x *studio, err error) {
			if !bytes.Equal(x.content("top.qcow2"), data) {
				x.Error("the image does not show what it showed")
			}
			x.sound("top.qcow2")
		}
		s.failing("top.qcow2", verb, after)
		if backing != "" {
			s.failing(backing, verb, after)
		}
	}
}

// What an image without a backing file never stored reads as zeros, also when it gets one.
func TestRebaseOfAnImageThatHadNoBackingFile(t *testing.T) {
	s, _ := newStudio(t)
	data := patchwork(24, verbDisk)
	s.image("lone.qcow2", FormatQcow2, "", data)
	r := RebaseRequest{Source: Source{Name: s.path("lone.qcow2")}, Backing: "base.qcow2", BackingFormat: FormatQcow2, Warnings: io.Discard}
	if err := r.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := s.content("lone.qcow2"); !bytes.Equal(got, data) {
		t.Errorf("the image does not show what it showed, first at %d", firstDifference(got, data))
	}
	s.sound("lone.qcow2")
}

// An interrupt in the middle leaves an image as it was, and tells.
func TestVerbsAreInterrupted(t *testing.T) {
	s, data := newStudio(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for name, verb := range map[string]func() error{
		"convert": func() error {
			r := ConvertRequest{Sources: []Source{{Name: s.path("top.qcow2"), Store: StoreOptions{ReadOnly: true}}}, Target: s.path("x.raw"), Format: FormatRaw}
			return r.Run(ctx)
		},
		"commit": func() error {
			r := CommitRequest{Source: Source{Name: s.path("top.qcow2")}, Warnings: io.Discard}
			return r.Run(ctx)
		},
		"rebase": func() error {
			r := RebaseRequest{Source: Source{Name: s.path("top.qcow2")}, Warnings: io.Discard}
			return r.Run(ctx)
		},
	} {
		if err := verb(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !bytes.Equal(s.content("top.qcow2"), data) {
		t.Error("the image does not show what it showed")
	}
}
