// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"sync"
	"time"
)

// Accel says how the guest's instructions are run.
type Accel string

// The accelerators that can be asked for.
const (
	AccelAuto Accel = "auto" // KVM where it boots the kernel, else software emulation
	AccelKVM  Accel = "kvm"
	AccelTCG  Accel = "tcg" // QEMU's software emulation: anywhere, and much slower
)

// probeTimeout bounds the trial boot with KVM, which takes about a second where it works; a /dev/kvm that cannot run a
// stock kernel hangs without a word.
const probeTimeout = 30 * time.Second

func (a Accel) qemu() string {
	if a == AccelTCG {
		return "tcg,thread=multi"
	}
	return string(a)
}

// cpu is the model with every feature that the accelerator has.
func (a Accel) cpu() string {
	if a == AccelTCG {
		return "max"
	}
	return "host"
}

// An accelHost is what the choice depends on, so that tests can play other machines.
type accelHost struct {
	kvm     string // device
	cpuinfo string
	probe   func(context.Context) error // boots the kernel with KVM
}

func thisHost(probe func(context.Context) error) accelHost {
	return accelHost{kvm: "/dev/kvm", cpuinfo: "/proc/cpuinfo", probe: probe}
}

var virtFlags = regexp.MustCompile(`(?m)^flags\s*:.*\b(vmx|svm)\b`)

// check tells why KVM cannot run a stock kernel here, as far as that can be told without a trial.
func (h *accelHost) check() error {
	f, err := os.OpenFile(h.kvm, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	f.Close()
	cpuinfo, err := os.ReadFile(h.cpuinfo)
	if err != nil {
		return err
	}
	if !virtFlags.Match(cpuinfo) {
		// Paravirtual KVM looks like this: the device is there, and a stock kernel hangs on it.
		return fmt.Errorf("%s opens, but %s has neither vmx nor svm", h.kvm, h.cpuinfo)
	}
	return nil
}

// CheckKVM tells why KVM cannot run a stock kernel here, nil when it looks as if it could; only a boot can be sure. Safe
// for concurrent use.
func CheckKVM() error {
	h := thisHost(nil)
	return h.check()
}

// choose settles an accelerator and gives the reason in words.
func (h *accelHost) choose(ctx context.Context, want Accel) (Accel, string, error) {
	switch want {
	case AccelKVM, AccelTCG:
		return want, "asked for", nil
	case AccelAuto, "":
	default:
		return "", "", fmt.Errorf("choose accelerator %q: unknown (auto, kvm or tcg)", want)
	}
	if err := h.check(); err != nil {
		return AccelTCG, fmt.Sprintf("no KVM: %v", err), nil
	}
	if err := h.probe(ctx); err != nil {
		if ctx.Err() != nil {
			return "", "", ctx.Err()
		}
		return AccelTCG, fmt.Sprintf("no KVM: trial boot failed: %v", err), nil
	}
	return AccelKVM, "trial boot succeeded", nil
}

// chosen remembers the outcome of trial boots: a machine does not change, and a failing one takes half a minute.
var chosen struct {
	sync.Mutex
	byKey map[string]error
}

// probeKVM boots the same kernel and user space with KVM, without disks, once a process.
func (c *Config) probeKVM(ctx context.Context) error {
	chosen.Lock()
	defer chosen.Unlock()
	key := c.QEMU + "\x00" + c.Kernel.Image
	if err, known := chosen.byKey[key]; known {
		return err
	}
	trial := Config{QEMU: c.QEMU, Kernel: c.Kernel, Initrd: c.Initrd, MemMiB: c.MemMiB, Accel: AccelKVM,
		Timeout: probeTimeout, Silence: probeTimeout / 2}
	result, err := Run(ctx, trial)
	if err == nil && result.Status != 0 {
		err = fmt.Errorf("trial script: exit status %d", result.Status)
	}
	if ctx.Err() != nil {
		return errors.Join(err, ctx.Err()) // says nothing about KVM
	}
	if chosen.byKey == nil {
		chosen.byKey = map[string]error{}
	}
	chosen.byKey[key] = err
	return err
}

// ChooseAccel tells which accelerator a boot of c will use, and why. With auto it may boot the kernel once for a
// trial; the outcome is remembered. Safe for concurrent use.
func ChooseAccel(ctx context.Context, c *Config) (accel Accel, reason string, err error) {
	own := *c
	if own.Kernel == nil {
		if own.Kernel, err = EnsureKernel(ctx, ""); err != nil {
			return "", "", err
		}
	}
	h := thisHost(own.probeKVM)
	return h.choose(ctx, c.Accel)
}
