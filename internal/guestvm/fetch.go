// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// fetchScript is one truth for this package and for scripts/deps.sh.
//
//go:embed fetch-kernel.sh
var fetchScript string

// FetchKernel downloads Debian's cloud kernel with apt-get into a directory of its own below dir and returns it; what is
// there already is not downloaded again. It needs no root. Without apt the error says what to do instead. Safe for
// concurrent use, by several processes too.
func FetchKernel(ctx context.Context, dir string) (*Kernel, error) {
	cmd := exec.CommandContext(ctx, "sh", "-s", "--", dir)
	cmd.Stdin = strings.NewReader(fetchScript)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("fetch kernel: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return newestKernel(strings.TrimSpace(stdout.String()))
}
