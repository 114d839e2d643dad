// SPDX-License-Identifier: Apache-2.0

package img_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-blk/sluice/internal/img"
)

// Goal: images in the formats of other houses are told about as qemu-img does. Method: its output on images that it made.
func TestInfoOfForeignFormats(t *testing.T) {
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("needs qemu-img to make images (apt-get install qemu-utils)")
	}
	dir := t.TempDir()
	run := func(args ...string) []byte {
		t.Helper()
		out, err := exec.Command("qemu-img", args...).Output()
		if err != nil {
			t.Fatalf("qemu-img %q: %v", args, err)
		}
		return out
	}
	source := filepath.Join(dir, "source")
	if err := os.WriteFile(source, bytes.Repeat([]byte("a disk "), 300000), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range [][2]string{
		{"vmdk", "subformat=monolithicSparse"},
		{"vmdk", "subformat=streamOptimized"},
		{"vhdx", "subformat=dynamic"},
		{"vhdx", "subformat=fixed"},
		{"vpc", "subformat=dynamic"},
		{"vpc", "subformat=fixed"},
		{"vpc", "subformat=dynamic,force_size=on"},
		{"vdi", "static=off"},
		{"vdi", "static=on"},
	} {
		t.Run(c[0]+" "+c[1], func(t *testing.T) {
			path := filepath.Join(dir, "image")
			run("convert", "-f", "raw", "-O", c[0], "-o", c[1], source, path)
			info, err := img.InfoOf(img.Source{Name: path, Format: c[0], Store: img.StoreOptions{ReadOnly: true}})
			if err != nil {
				t.Fatal(err)
			}
			var text, json bytes.Buffer
			if err := info.WriteText(&text); err != nil {
				t.Fatal(err)
			}
			if err := img.WriteJSON(&json, info); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(run("info", "-f", c[0], path)), text.String()); d != "" {
				t.Errorf("text differs (- is qemu-img's):\n%s", d)
			}
			if d := cmp.Diff(string(run("info", "-f", c[0], "--output=json", path)), json.String()); d != "" {
				t.Errorf("JSON differs (- is qemu-img's):\n%s", d)
			}
		})
	}
}
