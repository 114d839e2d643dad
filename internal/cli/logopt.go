// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/pflag"
)

// logFlags are the flags of the log, the same for every verb that has one.
type logFlags struct {
	level  string
	format string
}

func (f *logFlags) add(set *pflag.FlagSet) {
	set.StringVar(&f.level, "log-level", "info", "least level that is logged: debug, info, warn or error")
	set.StringVar(&f.format, "log-format", "text", "form of the log on standard error: text or json")
}

// quiet makes warn the default, for verbs whose output is a report and not a log.
func (f *logFlags) quiet(set *pflag.FlagSet) {
	const level = "warn"
	f.level = level
	set.Lookup("log-level").DefValue = level
}

// logger makes the logger, or a usage error.
func (f *logFlags) logger(w io.Writer) (*slog.Logger, error) {
	levels := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}
	level, ok := levels[f.level]
	if !ok {
		return nil, fmt.Errorf("--log-level: unknown level %q (want debug, info, warn or error)", f.level)
	}
	options := &slog.HandlerOptions{Level: level}
	switch f.format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, fmt.Errorf("--log-format: unknown format %q (want text or json)", f.format)
}
