// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"maps"
)

// checkHost looks at the work disk's file with the host's own tools: is the file system clean, and is in the files what
// the guest said.
func (d *demo) checkHost(ctx context.Context) error {
	if err := d.checkImage(ctx); err != nil {
		return err
	}
	if !d.guest {
		return nil
	}
	raw, err := d.rawWork()
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, tool("e2fsck"), "-fn", raw).CombinedOutput()
	if err != nil {
		return fmt.Errorf("e2fsck -fn finds the file system not clean: %w:\n%s", err, lastLines(out, 20))
	}
	d.check("on the host: e2fsck -fn finds the file system clean")
	for _, name := range slices.Sorted(maps.Keys(d.said.sums)) {
		data, err := exec.CommandContext(ctx, tool("debugfs"), "-R", "cat /"+name, raw).Output()
		if err != nil {
			return fmt.Errorf("read %s out of the image: %w", name, err)
		}
		sum := sha256.Sum256(data)
		if got := hex.EncodeToString(sum[:]); got != d.said.sums[name] {
			return fmt.Errorf("%s: the guest wrote sha256 %s, the image holds %s", name, d.said.sums[name], got)
		}
	}
	d.check("on the host: sha256 of %s equal to the guest's", strings.Join(slices.Sorted(maps.Keys(d.said.sums)), ", "))
	return nil
}

// tool finds a program that may stand in /sbin, which an ordinary user's PATH may lack.
func tool(name string) string {
	for _, p := range []string{name, "/sbin/" + name, "/usr/sbin/" + name} {
		if path, err := exec.LookPath(p); err == nil {
			return path
		}
	}
	return name
}
