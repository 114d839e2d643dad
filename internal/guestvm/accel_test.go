// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Goal: KVM only where it really boots a kernel. Method: machines played with files.
func TestChooseAccel(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	kvm := write("kvm", "")
	intel := write("intel", "processor\t: 0\nflags\t\t: fpu vme vmx sse\n")
	amd := write("amd", "flags\t\t: fpu svm\n")
	guest := write("guest", "flags\t\t: fpu vme sse\nvmx flags\t: none\nmodel name: svm vmx\n")
	none := filepath.Join(dir, "none")
	boots := func(context.Context) error { return nil }
	hangs := func(context.Context) error { return errors.New("nothing printed for 15s") }
	for _, c := range []struct {
		name   string
		want   Accel
		host   accelHost
		accel  Accel
		reason string
	}{
		{"intel", AccelAuto, accelHost{kvm, intel, boots}, AccelKVM, "trial boot succeeded"},
		{"amd, default", "", accelHost{kvm, amd, boots}, AccelKVM, "trial boot succeeded"},
		{"no device", AccelAuto, accelHost{none, intel, boots}, AccelTCG, "no such file"},
		{"no flag", AccelAuto, accelHost{kvm, guest, boots}, AccelTCG, "neither vmx nor svm"},
		{"no cpuinfo", AccelAuto, accelHost{kvm, none, boots}, AccelTCG, "no such file"},
		{"hangs", AccelAuto, accelHost{kvm, intel, hangs}, AccelTCG, "trial boot failed: nothing printed"},
		{"kvm asked for", AccelKVM, accelHost{none, none, hangs}, AccelKVM, "asked for"},
		{"tcg asked for", AccelTCG, accelHost{kvm, intel, boots}, AccelTCG, "asked for"},
	} {
		accel, reason, err := c.host.choose(t.Context(), c.want)
		if err != nil || accel != c.accel || !strings.Contains(reason, c.reason) {
			t.Errorf("%s: got %s, %q, %v; want %s, %q", c.name, accel, reason, err, c.accel, c.reason)
		}
	}
	h := accelHost{kvm, intel, boots}
	if _, _, err := h.choose(t.Context(), "hvf"); err == nil {
		t.Error("unknown accelerator is accepted")
	}
}

func TestChooseAccelEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	dir := t.TempDir()
	cpuinfo := filepath.Join(dir, "cpuinfo")
	if err := os.WriteFile(cpuinfo, []byte("flags : vmx\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := accelHost{cpuinfo, cpuinfo, func(context.Context) error { cancel(); return errors.New("killed") }}
	if accel, _, err := h.choose(ctx, AccelAuto); !errors.Is(err, context.Canceled) {
		t.Errorf("got %s, %v: a trial that was broken off says nothing about KVM", accel, err)
	}
}
