// SPDX-License-Identifier: Apache-2.0

package graph_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/graph"
)

// tool runs a program of QEMU's in dir, and skips where it is missing.
func tool(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("needs %s, to make images", name)
	}
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func img(t *testing.T, dir string, args ...string) string { return tool(t, dir, "qemu-img", args...) }

// qio has qemu-io carry out commands on an image.
func qio(t *testing.T, dir, path string, commands ...string) {
	t.Helper()
	args := []string{"-f", "qcow2"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	out := tool(t, dir, "qemu-io", append(args, path)...)
	if strings.Contains(out, "failed") || strings.Contains(out, "error") {
		t.Fatalf("qemu-io: %s", out)
	}
}

// mixed is a raw disk of text, noise and holes.
func mixed(t *testing.T, dir, name string, size int64) {
	t.Helper()
	b := make([]byte, size)
	rng := rand.New(rand.NewPCG(4, 2))
	for at := int64(0); at < size; {
		n := min(1+rng.Int64N(200_000), size-at)
		switch part := b[at : at+n]; rng.IntN(3) {
		case 0:
			for i := range part {
				part[i] = byte(rng.Uint32())
			}
		case 1:
			copy(part, strings.Repeat(fmt.Sprintf("line %d of a text\n", at), int(n)/10))
		}
		at += n
	}
	if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// contents reads a disk whole, in pieces of every size.
func contents(t *testing.T, s graph.Spec) []byte {
	t.Helper()
	s.ReadOnly = true
	n, err := graph.Build(context.Background(), s, graph.AnyPath)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, n)
}

// read reads a node whole and closes it.
func read(t *testing.T, n block.Node) []byte {
	t.Helper()
	h := block.NewHandle(n, nil)
	d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
	b := make([]byte, h.Info().Size)
	rng := rand.New(rand.NewPCG(1, 1))
	var calls []*blocktest.Call
	for at := 0; at < len(b); {
		k := min(1+rng.IntN(300_000), len(b)-at)
		calls = append(calls, &blocktest.Call{Op: block.OpRead, Offset: int64(at), Bufs: blocktest.Segments(b[at:at+k], 70_000)})
		at += k
	}
	if err := d.Run(calls...); err != nil {
		t.Fatal(err)
	}
	d.Close()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	return b
}

// same compares what we read with what qemu-img converts.
func same(t *testing.T, dir, name string, s graph.Spec, args ...string) {
	t.Helper()
	img(t, dir, append(append([]string{"convert", "-O", "raw"}, args...), name, "want.raw")...)
	want, err := os.ReadFile(filepath.Join(dir, "want.raw"))
	if err != nil {
		t.Fatal(err)
	}
	s.Path, s.Format = filepath.Join(dir, name), "qcow2"
	got := contents(t, s)
	if bytes.Equal(got, want) {
		return
	}
	if len(got) != len(want) {
		t.Fatalf("disk has %d bytes, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("byte at %#x is %#x, want %#x", i, got[i], want[i])
		}
	}
}

// Images of every kind that qemu-img makes are read as it reads them.
func TestImagesOfOthersAreReadAlike(t *testing.T) {
	const size = 5<<20 + 512
	for _, c := range []struct{ name, options string }{
		{"default", ""},
		{"compat 0.10", "compat=0.10"},
		{"clusters of 512", "cluster_size=512"},
		{"clusters of 2M", "cluster_size=2M"},
		{"refcounts of 1 bit", "refcount_bits=1"},
		{"refcounts of 64 bits", "refcount_bits=64"},
		{"lazy", "lazy_refcounts=on"},
		{"extended", "extended_l2=on"},
		{"extended, large", "extended_l2=on,cluster_size=2M"},
		{"compressed", "-c"},
		{"compressed 512", "-c,cluster_size=512"},
		{"compressed 4k", "-c,cluster_size=4k"},
		{"compressed 2M", "-c,cluster_size=2M"},
		{"compressed extended", "-c,extended_l2=on"},
		{"zstd", "-c,compression_type=zstd"},
		{"zstd 512", "-c,compression_type=zstd,cluster_size=512"},
		{"zstd 2M", "-c,compression_type=zstd,cluster_size=2M"},
		{"preallocated", "preallocation=metadata"},
		{"data file", "data_file=D"},
		{"raw data file", "data_file=D,data_file_raw=on"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			mixed(t, dir, "a.raw", size)
			args := []string{"convert", "-f", "raw", "-O", "qcow2"}
			options, compressed := strings.CutPrefix(c.options, "-c")
			if compressed {
				args = append(args, "-c")
			}
			if options = strings.TrimPrefix(options, ","); strings.Contains(options, "data_file=D") {
				// convert wants to be given a data file that is there.
				options = strings.ReplaceAll(options, "data_file=D", "data_file="+filepath.Join(dir, "d.data"))
			}
			if options != "" {
				args = append(args, "-o", options)
			}
			img(t, dir, append(args, "a.raw", "a.qcow2")...)
			same(t, dir, "a.qcow2", graph.Spec{}, "-f", "qcow2")
			same(t, dir, "a.qcow2", graph.Spec{Cache: block.CacheWriteback, Engine: aio.EngineThreads}, "-f", "qcow2")
		})
	}
}

// A chain of overlays with zeros, holes and data of all sizes, each in another format and folder.
func TestBackingChain(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"a", "a/b", "c"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	mixed(t, dir, "a/base.raw", 3<<20+1000) // ends inside a sector, and sooner than what stands before it
	img(t, filepath.Join(dir, "a/b"), "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "../base.raw", "-o", "cluster_size=4k", "one.qcow2", "4M")
	qio(t, dir, "a/b/one.qcow2", "write -P 7 1M 10k", "write -z 2M 64k", "write -P 9 3990k 8k")
	img(t, filepath.Join(dir, "c"), "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "../a/b/one.qcow2", "-o", "extended_l2=on", "two.qcow2", "6M")
	qio(t, dir, "c/two.qcow2", "write -P 3 1030k 2k", "discard 2050k 64k", "write -zu 100k 300k", "write -P 5 5M 512")
	img(t, dir, "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", filepath.Join(dir, "c/two.qcow2"), "three.qcow2")
	qio(t, dir, "three.qcow2", "write -P 1 0 512", "write -P 2 4095k 3k")
	same(t, dir, "three.qcow2", graph.Spec{}, "-f", "qcow2")

	// Through symbolic links, and from another working directory.
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "links"), 0o700), os.Symlink("../c/two.qcow2", filepath.Join(dir, "links/two"))); err != nil {
		t.Fatal(err)
	}
	t.Chdir("/")
	got := contents(t, graph.Spec{Path: filepath.Join(dir, "links/two"), Format: "qcow2"})
	want := contents(t, graph.Spec{Path: filepath.Join(dir, "c/two.qcow2"), Format: "qcow2"})
	if !bytes.Equal(got, want) {
		t.Error("other contents through a link")
	}

	// Alone, it has zeros where it has nothing of its own.
	alone := contents(t, graph.Spec{Path: filepath.Join(dir, "three.qcow2"), Format: "qcow2", NoBacking: true})
	for i, v := range alone {
		own := i < 512 || i >= 4095<<10 && i < 4098<<10
		if v != 0 && !own && i >= 64<<10 && i < 4032<<10 {
			t.Fatalf("byte at %#x is %#x without the chain", i, v)
		}
	}
}

// Writing to an overlay leaves what stands behind it as it is, and copies what it does not cover.
func TestWritesToAnOverlay(t *testing.T) {
	for _, o := range []string{"cluster_size=64k", "extended_l2=on", "cluster_size=512", "cluster_size=1M"} {
		t.Run(o, func(t *testing.T) {
			dir := t.TempDir()
			mixed(t, dir, "base.raw", 2<<20+5120)
			before, err := os.ReadFile(filepath.Join(dir, "base.raw"))
			if err != nil {
				t.Fatal(err)
			}
			img(t, dir, "convert", "-f", "raw", "-O", "qcow2", "-c", "base.raw", "middle.qcow2")
			img(t, dir, "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "middle.qcow2", "-o", o, "top.qcow2", "3M")
			path := filepath.Join(dir, "top.qcow2")
			n, err := graph.Build(context.Background(), graph.Spec{Path: path, Format: "qcow2"}, graph.AnyPath)
			if err != nil {
				t.Fatal(err)
			}
			h := block.NewHandle(n, nil)
			d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
			want := make([]byte, 3<<20)
			copy(want, before)
			rng := rand.New(rand.NewPCG(3, 3))
			for round := range 12 {
				var calls []*blocktest.Call
				for at := rng.IntN(9000); at < len(want)-200_000; at += rng.IntN(150_000) {
					k := 1 + rng.IntN(40_000)
					if rng.IntN(4) == 0 {
						clear(want[at : at+k])
						calls = append(calls, &blocktest.Call{Op: block.OpWriteZeroes, Offset: int64(at), Length: int64(k), Flags: block.FlagUnmap})
					} else {
						blocktest.Pattern(want[at:at+k], int64(at), byte(round))
						calls = append(calls, &blocktest.Call{Op: block.OpWrite, Offset: int64(at), Bufs: [][]byte{bytes.Clone(want[at : at+k])}})
					}
					at += k
				}
				if err := d.Run(calls...); err != nil {
					t.Fatal(err)
				}
			}
			got := make([]byte, len(want))
			if err := d.Read(0, got); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("other bytes, or %v", err)
			}
			d.Close()
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			img(t, dir, "check", "-q", "-f", "qcow2", path)
			img(t, dir, "convert", "-f", "qcow2", "-O", "raw", path, "got.raw")
			if got, err := os.ReadFile(filepath.Join(dir, "got.raw")); err != nil || !bytes.Equal(got, want) {
				t.Errorf("qemu-img reads other bytes, or %v", err)
			}
			if after, err := os.ReadFile(filepath.Join(dir, "base.raw")); err != nil || !bytes.Equal(after, before) {
				t.Error("the base changed")
			}
		})
	}
}

// A compressed image as a writable disk: what is not overwritten stays, the space is given back.
func TestWritesToCompressedClusters(t *testing.T) {
	for _, o := range []string{"compression_type=zlib", "compression_type=zstd", "cluster_size=512", "cluster_size=2M"} {
		t.Run(o, func(t *testing.T) {
			dir := t.TempDir()
			mixed(t, dir, "a.raw", 4<<20)
			want, err := os.ReadFile(filepath.Join(dir, "a.raw"))
			if err != nil {
				t.Fatal(err)
			}
			img(t, dir, "convert", "-f", "raw", "-O", "qcow2", "-c", "-o", o, "a.raw", "a.qcow2")
			path := filepath.Join(dir, "a.qcow2")
			n, err := graph.Build(context.Background(), graph.Spec{Path: path, Format: "qcow2"}, graph.AnyPath)
			if err != nil {
				t.Fatal(err)
			}
			h := block.NewHandle(n, nil)
			d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
			var calls []*blocktest.Call
			for at := 1000; at+512 < len(want); at += 50_000 {
				blocktest.Pattern(want[at:at+512], int64(at), 1)
				calls = append(calls, &blocktest.Call{Op: block.OpWrite, Offset: int64(at), Bufs: [][]byte{bytes.Clone(want[at : at+512])}})
				// At the same time others read it.
				calls = append(calls, &blocktest.Call{Op: block.OpRead, Offset: int64(at) + 512, Bufs: [][]byte{make([]byte, 512)}})
			}
			if err := d.Run(calls...); err != nil {
				t.Fatal(err)
			}
			for _, c := range calls {
				if at := c.Offset; c.Op == block.OpRead && !bytes.Equal(c.Bufs[0], want[at:at+512]) {
					t.Fatalf("other bytes at %d", at)
				}
			}
			if err := d.Flush(); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(want))
			if err := d.Read(0, got); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("other bytes, or %v", err)
			}
			d.Close()
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			img(t, dir, "check", "-q", "-f", "qcow2", path)
		})
	}
}

// Names that are a description in JSON, in all their spellings.
func TestBackingNamesInJSON(t *testing.T) {
	dir := t.TempDir()
	mixed(t, dir, "base.raw", 1<<20)
	want, err := os.ReadFile(filepath.Join(dir, "base.raw"))
	if err != nil {
		t.Fatal(err)
	}
	for name, ok := range map[string]bool{
		`json:{"driver":"raw","file":{"driver":"file","filename":"base.raw"}}`:                   true,
		`json: { "file" : { "filename" : "base.raw" , "driver" : "file" }, "driver": "raw" }`:    true,
		`json:{"driver":"raw","file.filename":"base.raw"}`:                                       true,
		`json:{"file.driver":"file","file.filename":"base.raw","driver":"raw","read-only":true}`: true,
		`json:{"driver":"file","filename":"base.raw"}`:                                           true,
		`file:base.raw`: true,
		`json:{"driver":"raw","file":{"driver":"nbd","host":"x"}}`:              false,
		`json:{"driver":"tape","file":{"driver":"file","filename":"base.raw"}}`: false,
		`json:{"driver":"raw","file":{"driver":"file","filename":"base.raw"}`:   false,
		`json:{"driver":"raw","offset":512,"file.filename":"base.raw"}`:         false,
		`json:[1]`:        false,
		`json:{}`:         false,
		`nbd://host/disk`: false,
	} {
		path := filepath.Join(dir, "top.qcow2")
		img(t, dir, "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "x", path, "1M")
		img(t, dir, "rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", name, path)
		n, err := graph.Build(context.Background(), graph.Spec{Path: path, Format: "qcow2", ReadOnly: true}, graph.AnyPath)
		switch {
		case ok && err != nil:
			t.Errorf("%s: %v", name, err)
		case !ok && err == nil:
			t.Errorf("%s: it was opened", name)
			n.Close()
		case ok:
			if !bytes.Equal(read(t, n), want) {
				t.Errorf("%s: other contents", name)
			}
		}
	}
}

func TestChainsThatAreRefused(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	mixed(t, dir, "base.raw", 1<<20)
	img(t, dir, "create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "b.qcow2", "a.qcow2", "1M")
	img(t, dir, "create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "a.qcow2", "b.qcow2", "1M")
	img(t, dir, "create", "-q", "-f", "qcow2", "self.qcow2", "1M")
	img(t, dir, "rebase", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "self.qcow2", "self.qcow2")
	img(t, dir, "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "none.raw", "missing.qcow2", "1M")
	img(t, dir, "create", "-q", "-f", "qcow2", "-o", "compat=0.10", "plain.qcow2", "1M")
	img(t, dir, "rebase", "-q", "-u", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "plain.qcow2")
	img(t, dir, "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "overlay.qcow2")
	dropFormat(t, at("overlay.qcow2"))
	img(t, dir, "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", `json:{"driver":"probe","file.filename":"base.raw"}`, "asks.qcow2", "1M")
	onlyOverlay := func(path string, _ bool) (string, error) {
		if path == at("plain.qcow2") {
			return path, nil
		}
		return "", syscall.EPERM
	}
	for _, c := range []struct {
		name  string
		spec  graph.Spec
		gate  graph.Gate
		errno syscall.Errno
		words string
	}{
		{"circle", graph.Spec{Path: at("a.qcow2")}, graph.AnyPath, syscall.ELOOP, "circle"},
		{"itself", graph.Spec{Path: at("self.qcow2")}, graph.AnyPath, syscall.ELOOP, "circle"},
		{"missing", graph.Spec{Path: at("missing.qcow2")}, graph.AnyPath, syscall.ENOENT, "none.raw"},
		{"gate", graph.Spec{Path: at("plain.qcow2")}, onlyOverlay, syscall.EPERM, "base.raw"},
		{"no format", graph.Spec{Path: at("overlay.qcow2")}, graph.AnyPath, syscall.EINVAL, "backing=probe"},
		{"an image that wants a guess", graph.Spec{Path: at("asks.qcow2")}, graph.AnyPath, syscall.EINVAL, `unknown format "probe"`},
		{"no qcow2", graph.Spec{Path: at("base.raw")}, graph.AnyPath, syscall.EINVAL, "not a qcow2 image"},
		{"writable snapshot", graph.Spec{Path: at("plain.qcow2"), Snapshot: "x"}, graph.AnyPath, syscall.EINVAL, "readonly"},
		{"no snapshot", graph.Spec{Path: at("plain.qcow2"), Snapshot: "x", ReadOnly: true}, graph.AnyPath, syscall.ENOENT, "x"},
		{"data file of none", graph.Spec{Path: at("plain.qcow2"), DataFile: at("base.raw")}, graph.AnyPath, syscall.EINVAL, "no external data file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.spec.Format = "qcow2"
			n, err := graph.Build(context.Background(), c.spec, c.gate)
			if err == nil {
				n.Close()
				t.Fatal("it was opened")
			}
			if !errors.Is(err, c.errno) || !strings.Contains(err.Error(), c.words) {
				t.Errorf("error is %q", err)
			}
		})
	}
	// With leave to guess, and without the chain, they open.
	for _, s := range []graph.Spec{{Path: at("overlay.qcow2"), ProbeBacking: true}, {Path: at("a.qcow2"), NoBacking: true}, {Path: at("missing.qcow2"), NoBacking: true}} {
		s.Format = "qcow2"
		n, err := graph.Build(context.Background(), s, graph.AnyPath)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

// dropFormat takes the name of the backing file's format out of an image, as programs that know none write them.
func dropFormat(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(b[:65536], []byte{0xe2, 0x79, 0x2a, 0xca})
	if at < 0 {
		t.Fatal("the image names no format")
	}
	copy(b[at:], []byte{0x12, 0x34, 0x56, 0x78}) // an extension that nobody knows
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// What stands behind an image may be shared by many, and is locked against writers.
func TestBackingFilesAreShared(t *testing.T) {
	dir := t.TempDir()
	mixed(t, dir, "base.raw", 1<<20)
	for _, name := range []string{"one.qcow2", "two.qcow2"} {
		img(t, dir, "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", name)
	}
	var nodes []block.Node
	for _, name := range []string{"one.qcow2", "two.qcow2"} {
		n, err := graph.Build(context.Background(), graph.Spec{Path: filepath.Join(dir, name), Format: "qcow2"}, graph.AnyPath)
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, n)
	}
	if n, err := graph.Build(context.Background(), graph.Spec{Path: filepath.Join(dir, "base.raw")}, graph.AnyPath); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("the base is opened for writing: %v", err)
		if err == nil {
			n.Close()
		}
	}
	for _, n := range nodes {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Snapshots are read as qemu-img reads them, while the disk goes on.
func TestSnapshotsAreRead(t *testing.T) {
	for _, o := range []string{"cluster_size=64k", "extended_l2=on", "cluster_size=1k"} {
		t.Run(o, func(t *testing.T) {
			dir := t.TempDir()
			mixed(t, dir, "base.raw", 1<<20)
			img(t, dir, "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "-o", o, "a.qcow2", "2M")
			qio(t, dir, "a.qcow2", "write -P 1 100k 300k")
			img(t, dir, "snapshot", "-c", "one", "a.qcow2")
			qio(t, dir, "a.qcow2", "write -P 2 200k 400k", "discard 0 64k", "write -z 1M 128k")
			img(t, dir, "snapshot", "-c", "two", "a.qcow2")
			path := filepath.Join(dir, "a.qcow2")
			n, err := graph.Build(context.Background(), graph.Spec{Path: path, Format: "qcow2"}, graph.AnyPath)
			if err != nil {
				t.Fatal(err)
			}
			h := block.NewHandle(n, nil)
			d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
			for at := int64(0); at < 2<<20; at += 50_000 {
				if err := d.Write(at, bytes.Repeat([]byte{9}, 10_000)); err != nil {
					t.Fatal(err)
				}
			}
			if err := d.Discard(512<<10, 256<<10); err != nil {
				t.Fatal(err)
			}
			d.Close()
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			img(t, dir, "check", "-q", "a.qcow2")
			for _, name := range []string{"one", "two", "2"} {
				l := name
				if name == "2" {
					l = "snapshot.id=2"
				} else {
					l = "snapshot.name=" + name
				}
				same(t, dir, "a.qcow2", graph.Spec{Snapshot: name}, "-f", "qcow2", "-l", l)
			}
			same(t, dir, "a.qcow2", graph.Spec{}, "-f", "qcow2")
		})
	}
}

// Writes to an image with a data file go there, and a raw one is the disk.
func TestWritesToADataFile(t *testing.T) {
	for _, raw := range []string{"off", "on"} {
		t.Run("raw="+raw, func(t *testing.T) {
			dir := t.TempDir()
			img(t, dir, "create", "-q", "-f", "qcow2", "-o", "data_file=d.raw,data_file_raw="+raw, "a.qcow2", "4M")
			path := filepath.Join(dir, "a.qcow2")
			t.Chdir("/") // the name is relative to the image
			n, err := graph.Build(context.Background(), graph.Spec{Path: path, Format: "qcow2"}, graph.AnyPath)
			if err != nil {
				t.Fatal(err)
			}
			h := block.NewHandle(n, nil)
			d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
			want := make([]byte, 4<<20)
			for at := int64(1000); at < 3<<20; at += 300_000 {
				blocktest.Pattern(want[at:at+70_000], at, 1)
				if err := d.Write(at, want[at:at+70_000]); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(d.Zero(300_000, 100_000, block.FlagUnmap), d.Discard(2<<20, 65536), d.Zero(2<<20, 65536, 0)); err != nil {
				t.Fatal(err)
			}
			clear(want[300_000:400_000])
			clear(want[2<<20 : 2<<20+65536])
			got := make([]byte, len(want))
			if err := errors.Join(d.Flush(), d.Read(0, got)); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("other bytes, or %v", err)
			}
			d.Close()
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			img(t, dir, "check", "-q", "a.qcow2")
			img(t, dir, "convert", "-f", "qcow2", "-O", "raw", "a.qcow2", "got.raw")
			for _, name := range map[string][]string{"off": {"got.raw"}, "on": {"got.raw", "d.raw"}}[raw] {
				if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s has other bytes, or %v", name, err)
				}
			}
		})
	}
}
