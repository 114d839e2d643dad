// SPDX-License-Identifier: Apache-2.0

package graph_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/graph"
)

func image(t *testing.T, size int, head string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	b := make([]byte, size)
	copy(b, head)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestBuild(t *testing.T) {
	path := image(t, 1<<20, "some data")
	for _, c := range []struct {
		name string
		spec graph.Spec
		size int64
	}{
		{"file", graph.Spec{Path: path}, 1 << 20},
		{"named", graph.Spec{Driver: "file", Format: "raw", Path: path, Lock: "off"}, 1 << 20},
		{"probed", graph.Spec{Path: path, Format: "probe"}, 1 << 20},
		{"looking on", graph.Spec{Path: path, ReadOnly: true, Lock: "shared"}, 1 << 20},
		{"window", graph.Spec{Path: path, Offset: 4096, Window: 8192}, 8192},
		{"window on no block", graph.Spec{Path: path, Offset: 7, Window: 9}, 9},
		{"faults", graph.Spec{Path: path, Fault: "read error=EIO"}, 1 << 20},
		{"null", graph.Spec{Driver: "null", Size: 1 << 40}, 1 << 40},
		{"mem", graph.Spec{Driver: "mem", Size: 12345, Fault: "flush error=EIO", Offset: 1}, 12344},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, err := graph.Build(context.Background(), c.spec, graph.AnyPath)
			if err != nil {
				t.Fatal(err)
			}
			if n.Info().Size != c.size {
				t.Errorf("size is %d, want %d", n.Info().Size, c.size)
			}
			h := block.NewHandle(n, nil)
			d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
			if err := d.Read(0, make([]byte, 9)); err != nil && !strings.Contains(c.spec.Fault, "read") {
				t.Error(err)
			}
			d.Close()
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestWhatIsRefused(t *testing.T) {
	path := image(t, 4096, "")
	refuse := func(string, bool) (string, error) { return "", syscall.EPERM }
	for _, c := range []struct {
		name  string
		spec  graph.Spec
		gate  graph.Gate
		errno syscall.Errno
		words string
	}{
		{"driver", graph.Spec{Driver: "nbd"}, graph.AnyPath, syscall.EINVAL, "unknown driver"},
		{"format", graph.Spec{Path: path, Format: "qed"}, graph.AnyPath, syscall.EINVAL, "unknown format"},
		{"snapshot of raw", graph.Spec{Path: path, ReadOnly: true, Snapshot: "a"}, graph.AnyPath, syscall.EINVAL, "format=qcow2"},
		{"window that grows", graph.Spec{Path: path, Growable: true, Offset: 512}, graph.AnyPath, syscall.EINVAL, "no window"},
		{"writing a foreign format", graph.Spec{Path: path, Format: "vmdk"}, graph.AnyPath, syscall.EROFS, "only read"},
		{"a foreign format that is none", graph.Spec{Path: path, Format: "vdi", ReadOnly: true}, graph.AnyPath, syscall.EIO, "no magic"},
		{"a foreign format of nothing", graph.Spec{Driver: "null", Size: 1, Format: "vdi", ReadOnly: true}, graph.AnyPath, syscall.EINVAL, "stands on a file"},
		{"lock", graph.Spec{Path: path, Lock: "maybe"}, graph.AnyPath, syscall.EINVAL, "unknown lock"},
		{"no path", graph.Spec{}, graph.AnyPath, syscall.EINVAL, "needs a path"},
		{"size of a file", graph.Spec{Path: path, Size: 1}, graph.AnyPath, syscall.EINVAL, "its own"},
		{"path of null", graph.Spec{Driver: "null", Path: path, Size: 1}, graph.AnyPath, syscall.EINVAL, "no path"},
		{"null without size", graph.Spec{Driver: "null"}, graph.AnyPath, syscall.EINVAL, "needs a size"},
		{"probing memory", graph.Spec{Driver: "mem", Size: 1, Format: "probe"}, graph.AnyPath, syscall.EINVAL, "nothing to probe"},
		{"no gate", graph.Spec{Path: path}, nil, syscall.EACCES, "no path may be opened"},
		{"gate shut", graph.Spec{Path: path}, refuse, syscall.EPERM, path},
		{"window beyond", graph.Spec{Path: path, Window: 1 << 30}, graph.AnyPath, syscall.EINVAL, "beyond"},
		{"fault", graph.Spec{Path: path, Fault: "nonsense"}, graph.AnyPath, 0, "unknown operation"},
		{"missing", graph.Spec{Path: path + "x"}, graph.AnyPath, syscall.ENOENT, "x"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, err := graph.Build(context.Background(), c.spec, c.gate)
			if err == nil {
				n.Close()
				t.Fatal("it was built")
			}
			if n != nil || c.errno != 0 && !errors.Is(err, c.errno) || !strings.Contains(err.Error(), c.words) {
				t.Errorf("error is %q, node %v", err, n)
			}
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := graph.Build(ctx, graph.Spec{Path: path}, graph.AnyPath); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// An image of another house is opened in the format that is named, and in the one that it begins as when probing was
// asked for; it is only read.
func TestForeignFormats(t *testing.T) {
	// A static image of two blocks, written by hand.
	b := make([]byte, 1024+2<<20)
	copy(b[0x40:], "\x7f\x10\xda\xbe\x01\x00\x01\x00\x90\x01\x00\x00\x02")
	for at, v := range map[int]uint32{0x154: 512, 0x158: 1024, 0x168: 512, 0x170: 2 << 20, 0x178: 1 << 20, 0x180: 2, 512: 1, 516: 0} {
		binary.LittleEndian.PutUint32(b[at:], v)
	}
	copy(b[1024:], "second")
	copy(b[1024+1<<20:], "first!")
	path := filepath.Join(t.TempDir(), "disk.vdi")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"vdi", "probe"} {
		n, err := graph.Build(context.Background(), graph.Spec{Path: path, Format: format, ReadOnly: true, Offset: 512}, graph.AnyPath)
		if err != nil {
			t.Fatal(err)
		}
		h := block.NewHandle(n, nil)
		d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
		got := make([]byte, 6)
		if err := d.Read(1<<20-512, got); err != nil || string(got) != "second" || h.Info().Size != 2<<20-512 {
			t.Errorf("%s: %q of %d, %v", format, got, h.Info().Size, err)
		}
		d.Close()
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A refused graph leaves nothing open and nothing locked.
func TestNothingStaysLocked(t *testing.T) {
	path := image(t, 4096, "QFI\xfb\x00\x00\x00\x03")
	for _, s := range []graph.Spec{{Path: path, Format: "probe"}, {Path: path, Fault: "x"}, {Path: path, Window: 1 << 20}} {
		if _, err := graph.Build(context.Background(), s, graph.AnyPath); err == nil {
			t.Fatal("it was built")
		}
	}
	n, err := graph.Build(context.Background(), graph.Spec{Path: path}, graph.AnyPath)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// The format is what was said, whatever the guest wrote; probing refuses what it knows and takes the rest as raw.
func TestFormats(t *testing.T) {
	vdi := append(bytes.Repeat([]byte{0}, 64), 0x7f, 0x10, 0xda, 0xbe)
	for head, format := range map[string]string{
		"QFI\xfb\x00\x00\x00\x02":       "qcow2",
		"QFI\xfb\x00\x00\x00\x03":       "qcow2",
		"QFI\xfb\x00\x00\x00\x01":       "qcow",
		"KDMV":                          "vmdk",
		"# Disk DescriptorFile\n":       "vmdk",
		"vhdxfile":                      "vhdx",
		"conectix":                      "vpc",
		string(vdi):                     "vdi",
		"LUKS\xba\xbe\x00\x02":          "luks",
		"QED\x00":                       "qed",
		"\xeb\x63\x90 boot sector":      "",
		"QF":                            "",
		"":                              "",
		"\x7f\x10\xda\xbe at the start": "",
	} {
		path := image(t, 4096, head)
		n, err := graph.Build(context.Background(), graph.Spec{Path: path, Format: "raw"}, graph.AnyPath)
		if err != nil {
			t.Fatalf("%q as raw: %v", head, err)
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		n, err = graph.Build(context.Background(), graph.Spec{Path: path, Format: "probe"}, graph.AnyPath)
		switch {
		case format == "" && err != nil:
			t.Errorf("%q probed: %v", head, err)
		case format != "" && (!errors.Is(err, syscall.ENOTSUP) || !strings.Contains(err.Error(), " "+format+" image") || !strings.Contains(err.Error(), "format=raw")):
			t.Errorf("%q probed: %v, want %s", head, err, format)
		}
		if err == nil {
			if err := n.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
