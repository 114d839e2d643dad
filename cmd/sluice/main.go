// SPDX-License-Identifier: Apache-2.0

// Command sluice serves virtual disks to virtual machines. `sluice --help` says the rest.
package main

import (
	"os"

	"github.com/sluice-blk/sluice/internal/cli"
)

func main() {
	os.Exit(cli.MainOf(os.Args, cli.Std()))
}
