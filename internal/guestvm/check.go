// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"context"
	"fmt"
	"os/exec"
)

// Check tells why no guest can be booted here: QEMU, a static busybox or a kernel is missing and, the kernel, cannot be
// fetched. Nil means that they are all there. A test skips with its text. Safe for concurrent use.
func Check(ctx context.Context) error {
	if _, err := exec.LookPath(defaultQEMU); err != nil {
		return fmt.Errorf("no guest: %w (install qemu-system-x86)", err)
	}
	dynamic, err := checkGuestBinary(defaultBusybox)
	if err == nil && dynamic {
		err = fmt.Errorf("%s is not static", defaultBusybox)
	}
	if err != nil {
		return fmt.Errorf("no guest: %w (install busybox-static)", err)
	}
	if _, err := EnsureKernel(ctx, ""); err != nil {
		return fmt.Errorf("no guest: %w", err)
	}
	return nil
}
