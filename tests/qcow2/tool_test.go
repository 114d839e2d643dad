// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
)

// ours runs our tool under the name of the peer's.
func (i *image) ours(args ...string) (string, error) {
	i.Helper()
	if _, err := os.Stat(i.path("../ours")); err != nil {
		i.must(linkOurs(i.root))
	}
	return command(i.dir, "../ours/qemu-img", args...)
}

func (i *image) does(args ...string) string {
	i.Helper()
	out, err := i.ours(args...)
	i.must(err)
	return out
}

// mixture is data of which a part compresses and a part does not, with holes.
func mixture(size int64) []byte {
	b := make([]byte, size)
	for at, s := int64(0), 0; at < size; at, s = at+70_000, s+5 {
		if s%3 > 0 {
			sourced(b[at:min(at+70_000, size)], s%sourceCount)
		}
	}
	return b
}

// In the smallest clusters, room for a compressed cluster now and then needs a new refcount block first.
func TestCompressedConversionIntoTheSmallestClusters(t *testing.T) {
	i := newImage(t)
	i.must(os.WriteFile(i.path("data.raw"), mixture(16<<20), 0o600))
	i.does("convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=512", "data.raw", imageName)
	i.img("compare", "-q", "-f", "raw", "-F", "qcow2", "data.raw", imageName)
	i.clean()
}

// A hole at the end of a file is a part of the disk, and stays a hole.
func TestConversionKeepsTheHoleAtTheEnd(t *testing.T) {
	i := newImage(t)
	data := make([]byte, 10<<20)
	sourced(data[192<<10:256<<10], 9)
	i.must(writeSparse(i.path("data.raw"), data))
	i.does("convert", "-f", "raw", "-O", "raw", "data.raw", "copy.raw")
	i.does("convert", "-f", "raw", "-O", "qcow2", "data.raw", imageName)
	i.does("convert", "-f", "qcow2", "-O", "raw", imageName, "back.raw")
	for _, name := range []string{"copy.raw", "back.raw"} {
		got, err := os.ReadFile(i.path(name))
		i.must(err)
		if !bytes.Equal(got, data) {
			t.Errorf("%s has %d bytes and is not the same", name, len(got))
		}
		st, err := os.Stat(i.path(name))
		i.must(err)
		if blocks := st.Sys().(*syscall.Stat_t).Blocks; blocks > 160 {
			t.Errorf("%s takes %d sectors, for 128 of data", name, blocks)
		}
	}
	i.clean()
}

// Data that is in the page cache only is data.
func TestConversionSeesWhatWasJustWritten(t *testing.T) {
	rounds := 10
	if soaking() {
		rounds = 200
	}
	i := newImage(t)
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range rounds {
		data := make([]byte, 8<<20)
		f, err := os.Create(i.path("fresh.raw"))
		i.must(err)
		i.must(f.Truncate(8 << 20))
		for range 100 {
			at := rng.Int64N(2048) * 4096
			sourced(data[at:at+4096], rng.IntN(sourceCount))
			_, err := f.WriteAt(data[at:at+4096], at)
			i.must(err)
		}
		i.does("convert", "-f", "raw", "-O", "raw", "fresh.raw", "copy.raw")
		i.must(f.Close())
		if got, err := os.ReadFile(i.path("copy.raw")); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("round %d: the copy is not the same (%v)", round, err)
		}
	}
}

// An overlay without the format of what is below it would have to be guessed at each time it is opened.
func TestOverlayWithoutABackingFormatIsRefused(t *testing.T) {
	i := newImage(t)
	i.must(os.WriteFile(i.path("base.raw"), make([]byte, 1<<20), 0o600))
	_, err := i.ours("create", "-f", "qcow2", "-b", "base.raw", imageName)
	if status(err) != 1 || !strings.Contains(err.Error(), "backing format") && !strings.Contains(err.Error(), "Backing file specified without backing format") || !strings.Contains(err.Error(), "raw") {
		t.Errorf("%v, want it refused, with the format that was found", err)
	}
	if _, err := os.Stat(i.path(imageName)); err == nil {
		t.Error("a file was left behind")
	}
}

// What a guest wrote to its raw disk is not what the disk is.
func TestResizeOfARawDiskThatLooksLikeAnImage(t *testing.T) {
	i := newImage(t, "-b", "/etc/hostname", "-F", "raw", "-u", imageName, "1M")
	disk, err := os.ReadFile(i.path(imageName))
	i.must(err)
	disk = append(disk, make([]byte, 1<<20-len(disk))...)
	i.must(os.WriteFile(i.path("disk.raw"), disk, 0o600))
	i.does("resize", "-f", "raw", "disk.raw", "2M")
	got, err := os.ReadFile(i.path("disk.raw"))
	i.must(err)
	if len(got) != 2<<20 || !bytes.Equal(got[:1<<20], disk) || len(bytes.Trim(got[1<<20:], "\x00")) > 0 {
		t.Error("more than its length was changed")
	}
}

// A disk whose format nobody named, and whose guest made it look like an image with a data file, is left alone, and so is
// the file that the guest named.
func TestResizeOpensNoFileThatAGuestNamed(t *testing.T) {
	i := newImage(t, "-o", "data_file=victim", imageName, "1M")
	victim := []byte(strings.Repeat("precious", 1<<17))
	i.must(os.WriteFile(i.path("victim"), victim, 0o600))
	before := i.load().file
	if _, err := i.ours("resize", "--shrink", imageName, "512k"); status(err) != 1 || !strings.Contains(err.Error(), "data file") {
		t.Errorf("%v, want it refused for the data file", err)
	}
	got, err := os.ReadFile(i.path("victim"))
	i.must(err)
	if !bytes.Equal(got, victim) || !bytes.Equal(i.load().file, before) {
		t.Error("a file was changed")
	}
}

// A refcount table that is said to have no clusters is built anew.
func TestRepairOfAnImageWithoutARefcountTable(t *testing.T) {
	i := newImage(t, imageName, "4M")
	i.io("write -q -s ../s1 0 1M")
	i.patch(56, 0, 0, 0, 0)
	if _, err := i.ours("check", "-f", "qcow2", "-r", "all", imageName); err != nil {
		t.Error(err)
	}
	i.clean()
	want := newContent(4 << 20)
	sourced(want.data[:1<<20], 1)
	i.must(i.holds(imageName, "qcow2", &want))
}

// A bitmap that was in use when its user died says nothing that can be believed: it is listed so, and good for nothing but
// to be removed.
func TestBitmapThatWasInUse(t *testing.T) {
	i := newImage(t, imageName, "16M")
	i.img("bitmap", "--add", imageName, "b")
	n := i.load()
	directory := int64(binary.BigEndian.Uint64(n.bitmaps[16:]))
	i.patch(directory+15, n.file[directory+15]|1)
	out := i.does("info", "--output=json", "-f", "qcow2", imageName)
	var info struct {
		Specific struct {
			Data struct {
				Bitmaps []struct {
					Name  string
					Flags []string
				}
			}
		} `json:"format-specific"`
	}
	i.must(json.Unmarshal([]byte(out), &info))
	if b := info.Specific.Data.Bitmaps; len(b) != 1 || b[0].Name != "b" || !strings.Contains(fmt.Sprint(b[0].Flags), "in-use") {
		t.Errorf("bitmaps are %+v, want one in use", b)
	}
	i.img("create", "-q", "-f", "qcow2", "other.qcow2", "16M")
	i.img("bitmap", "--add", "other.qcow2", "c")
	for _, args := range [][]string{{"--enable", imageName, "b"}, {"--clear", imageName, "b"}, {"--merge", "b", "-b", imageName, "-F", "qcow2", "other.qcow2", "c"}} {
		if _, err := i.ours(append([]string{"bitmap"}, args...)...); status(err) != 1 {
			t.Errorf("bitmap %v: %v, want it refused", args, err)
		}
	}
	i.does("bitmap", "--remove", imageName, "b")
	if out := i.does("info", "--output=json", "-f", "qcow2", imageName); strings.Contains(out, "bitmaps") {
		t.Errorf("it is still there:\n%s", out)
	}
	i.clean()
}

// What measure foretells is enough for an image that is filled, trimmed and filled again, with a bitmap in it.
func TestMeasureIsEnough(t *testing.T) {
	for _, options := range []string{"cluster_size=64k", "cluster_size=4k"} {
		t.Run(options, func(t *testing.T) {
			const size = 16 << 20
			i := newImage(t, "-o", options, imageName, fmt.Sprint(size))
			i.img("bitmap", "--add", imageName, "b")
			var told struct {
				Full    int64 `json:"fully-allocated"`
				Bitmaps int64
			}
			i.must(json.Unmarshal([]byte(i.does("measure", "--output=json", "-O", "qcow2", "-o", options, "-f", "qcow2", imageName)), &told))
			k := i.opens(nil)
			rng := rand.New(rand.NewPCG(1, 3))
			for range 20 {
				i.must(k.one(Op{Kind: Write, Len: size, Source: rng.IntN(sourceCount)}))
				i.must(k.one(Op{Kind: Flush}))
				at := rng.Int64N(size/65536/2) * 65536
				i.must(k.one(Op{Kind: Discard, Off: at, Len: size / 4}))
				i.must(k.one(Op{Kind: Flush}))
			}
			i.must(k.close())
			out, err := command(i.dir, "qemu-img", "check", "--output=json", "-f", "qcow2", imageName)
			i.must(err)
			var is struct {
				End int64 `json:"image-end-offset"`
			}
			i.must(json.Unmarshal([]byte(out), &is))
			if is.End > told.Full+told.Bitmaps {
				t.Errorf("the image ends at %d, and measure said %d and %d for bitmaps", is.End, told.Full, told.Bitmaps)
			}
		})
	}
}

// Images that our tool makes, converts and changes count each cluster as often as it is used, in every width of a count.
func TestRefcountsOfWhatOurToolMakes(t *testing.T) {
	i := newImage(t)
	i.must(os.WriteFile(i.path("data.raw"), mixture(2<<20), 0o600))
	for _, bits := range []int{1, 2, 4, 8, 16, 32, 64} {
		i.does("create", "-q", "-f", "qcow2", "-o", fmt.Sprintf("refcount_bits=%d,cluster_size=4k", bits), imageName, "3M")
		i.wholly()
		i.does("convert", "-f", "raw", "-O", "qcow2", "-o", fmt.Sprintf("refcount_bits=%d,cluster_size=2k", bits), "data.raw", imageName)
		i.wholly()
		for _, other := range []int{16, 64, bits} {
			i.does("amend", "-q", "-f", "qcow2", "-o", fmt.Sprintf("refcount_bits=%d", other), imageName)
			i.wholly()
			if n := i.load(); n.refcountBits != int64(other) {
				t.Errorf("width is %d, want %d", n.refcountBits, other)
			}
		}
		i.img("compare", "-q", "-f", "raw", "-F", "qcow2", "data.raw", imageName)
	}
}

// wholly wants nothing to complain about.
func (i *image) wholly() {
	i.Helper()
	i.clean()
	if v := i.load().check(); len(v.errors)+len(v.copied)+len(v.leaks)+len(v.ghosts) > 0 {
		i.Errorf("%s", &v)
	}
}
