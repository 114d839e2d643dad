// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func newVersion(s Streams) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Long:  "Print the version, the revision that it was built from, the Go release and the platform.",
		Args:  noArgs,
		RunE: verb(func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(s.Out, versionLine())
			return err
		}),
	}
}

// versionLine tells the module's version, or the revision of a build from a checkout.
func versionLine() string {
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = buildVersion(info)
	}
	return fmt.Sprintf("sluice %s (%s, %s/%s)", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func buildVersion(info *debug.BuildInfo) string {
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	revision, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = ", modified"
		}
	}
	if revision == "" {
		return "devel"
	}
	return fmt.Sprintf("devel %.12s%s", revision, dirty)
}
