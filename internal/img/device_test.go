// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

// loopDevice makes a block device of 10 MiB that begins with something.
func loopDevice(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make a loop device")
	}
	path := filepath.Join(t.TempDir(), "file")
	if err := errors.Join(os.WriteFile(path, bytes.Repeat([]byte("QFI\xfb\x00\x00\x00\x03"), 1024), 0o600), os.Truncate(path, 10<<20)); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "-f", "--show", path).CombinedOutput()
	if err != nil {
		t.Skipf("needs loop devices: %v: %s", err, out)
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "-d", device).CombinedOutput(); err != nil {
			t.Errorf("losetup -d %s: %v: %s", device, err, out)
		}
	})
	return device
}

func TestDeviceKeepsItsSize(t *testing.T) {
	device := loopDevice(t)
	s, err := OpenStore(device, StoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.mustSize(t, 10<<20)
	if err := errors.Join(s.Truncate(0), s.Truncate(1<<20)); err != nil {
		t.Errorf("shorter: %v", err)
	}
	if err := s.Truncate(11 << 20); !errors.Is(err, syscall.ENOTSUP) {
		t.Errorf("longer: %v", err)
	}
	if err := errors.Join(s.Zero(0, 4), s.Zero(512, 1<<20), s.Discard(2<<20, 1<<20), s.Allocate(0, 1<<20), s.Flush()); err != nil {
		t.Error(err)
	}
	if got := s.mustRead(t, 0, 8); got != "\x00\x00\x00\x00\x00\x00\x00\x03" {
		t.Errorf("begins with %q", got)
	}
	s.mustSize(t, 10<<20)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestImagesOnADevice(t *testing.T) {
	device := loopDevice(t)
	create := func(format, size string) error {
		o, err := PrepareCreate(&CreateRequest{Path: device, Format: format, Size: size})
		if err != nil {
			return err
		}
		return Create(device, format, o)
	}
	src := Source{Name: device, Store: StoreOptions{ReadOnly: true}}
	is := func(format string) {
		t.Helper()
		if i, err := InfoOf(src); err != nil || i.Format != format || i.ActualSize != 0 {
			t.Errorf("it is %+v, %v; want %s", i, err, format)
		}
	}
	if err := create(FormatQcow2, "104857600"); err != nil {
		t.Fatal(err)
	}
	is(FormatQcow2)
	r := &ResizeRequest{Source: Source{Name: device, Format: FormatQcow2}, Size: "+100M"}
	if err := Resize(r); err != nil {
		t.Errorf("a larger disk: %v", err)
	}
	c := &CheckRequest{Source: Source{Name: device}, Report: func(line string) { t.Error(line) }, Repair: check.Nothing}
	if found, err := Check(c); err != nil || found.ExitStatus() != 0 {
		t.Errorf("%+v, %v", found, err)
	}
	// A raw image is one after that, not what the device began with.
	if err := create(FormatRaw, "5242880"); err != nil {
		t.Fatal(err)
	}
	is(FormatRaw)
	if err := create(FormatRaw, "20971520"); err == nil || err.Error() != "Cannot grow device files" {
		t.Errorf("a raw image that is larger: %v", err)
	}
	for size, want := range map[string]string{"10M": "", "5M": "Cannot resize device files", "20M": "Cannot resize device files"} {
		err := Resize(&ResizeRequest{Source: Source{Name: device, Format: FormatRaw}, Size: size, Shrink: true})
		if (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("resize to %s: %v", size, err)
		}
	}
}
