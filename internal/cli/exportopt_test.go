// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluice-blk/sluice/internal/daemon"
)

func TestExportOptions(t *testing.T) {
	for text, want := range map[string]exportOption{
		"/run/a.sock":  {path: "/run/a.sock"},
		"a,,b":         {path: "a,b"},
		"./fd:3":       {path: "./fd:3"},
		"fd:3":         {fd: 3},
		"fd:1000":      {fd: 1000},
		"systemd:disk": {systemd: "disk"},
		"systemd:0":    {systemd: "0"},
		"unix:x":       {path: "unix:x"},
	} {
		want.text = text
		got, err := parseExport(text)
		if err != nil {
			t.Errorf("parseExport(%q): %v", text, err)
		} else if d := cmp.Diff(want, got, cmp.AllowUnexported(exportOption{})); d != "" {
			t.Errorf("parseExport(%q) (-want +got):\n%s", text, d)
		}
	}
	for text, want := range map[string]string{
		"": "no socket", "a,readonly": `unknown option "readonly"`, "fd:": "not an inherited", "fd:x": "not an inherited", "fd:-1": "not an inherited",
		"fd:2": "from 3", "fd:9999999": "not an inherited", "systemd:": "no socket is named",
	} {
		if _, err := parseExport(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parseExport(%q): %v; want an error with %q", text, err, want)
		}
	}
}

// Disks and exports come from different flags and keep the order of the command line.
func TestExportsBelongToTheDiskBeforeThem(t *testing.T) {
	f := &serveFlags{}
	cmd := newServe(Streams{})
	_ = f
	var list diskList
	cmd.ResetFlags()
	cmd.Flags().Var(diskFlag{&list}, "disk", "")
	cmd.Flags().Var(exportFlag{&list}, "vhost-user", "")
	args := []string{"--disk", "a", "--vhost-user", "a1", "--vhost-user=a2", "--disk=b,readonly", "--vhost-user", "b1"}
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	disks, err := list.resolve(&daemon.HandedSockets{})
	if err != nil {
		t.Fatal(err)
	}
	want := []daemon.DiskConfig{
		{Path: "a", Exports: []daemon.ExportConfig{{Socket: "a1", Name: "a1"}, {Socket: "a2", Name: "a2"}}},
		{Path: "b", ReadOnly: true, Exports: []daemon.ExportConfig{{Socket: "b1", Name: "b1"}}},
	}
	if d := cmp.Diff(want, disks, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestCPULists(t *testing.T) {
	for text, want := range map[string][]int{"0": {0}, "0-3,6": {0, 1, 2, 3, 6}, "7,1": {7, 1}, "1023": {1023}} {
		if got, err := parseCPUs(text); err != nil || !cmp.Equal(got, want) {
			t.Errorf("parseCPUs(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "-", "1-", "3-1", "a", "1,,2", "1,1", "0-3,2", "1024", "-1", "0-99999999"} {
		if got, err := parseCPUs(text); err == nil {
			t.Errorf("parseCPUs(%q) = %v, want an error", text, got)
		}
	}
}

// Whatever the command line got wrong is told in one line and ends with status 2, before anything is opened.
func TestUsageErrors(t *testing.T) {
	disk := []string{"--disk", "/nonexistent/d", "--vhost-user", "/nonexistent/s"}
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no verb":            {nil, "no command is given"},
		"bench of nothing":   {[]string{"bench", "--iodepth", "0"}, "--iodepth is 0"},
		"unknown verb":       {[]string{"frobnicate"}, `unknown command "frobnicate"`},
		"unknown flag":       {[]string{"--frobnicate"}, "unknown flag: --frobnicate"},
		"unknown serve flag": {[]string{"serve", "--frobnicate"}, "unknown flag: --frobnicate"},
		"no disk":            {[]string{"serve"}, "no --disk is given"},
		"no export":          {[]string{"serve", "--disk", "d"}, "disk d has no export (follow it with --vhost-user SOCKET)"},
		"export first":       {[]string{"serve", "--vhost-user", "s", "--disk", "d"}, "it stands before any --disk"},
		"bad key":            {[]string{"serve", "--disk", "d,sise=1"}, "known keys: format, driver,"},
		"argument":           {append([]string{"serve", "extra"}, disk...), `unexpected argument "extra"`},
		"loops":              {append([]string{"serve", "--loops", "0"}, disk...), "--loops is 0 (want 1 to 256)"},
		"poller":             {append([]string{"serve", "--poller", "kqueue"}, disk...), "want auto, io_uring, epoll or poll"},
		"batch":              {append([]string{"serve", "--batch", "maybe"}, disk...), "--batch:"},
		"pin":                {append([]string{"serve", "--pin=x"}, disk...), "--pin:"},
		"poll-max":           {append([]string{"serve", "--poll-max", "-1s"}, disk...), "cannot be negative"},
		"log-level":          {append([]string{"serve", "--log-level", "loud"}, disk...), "want debug, info, warn or error"},
		"log-format":         {append([]string{"serve", "--log-format", "xml"}, disk...), "want text or json"},
		"ready-fd":           {append([]string{"serve", "--ready-fd", "0"}, disk...), "--ready-fd is 0"},
		"ready-fd closed":    {append([]string{"serve", "--ready-fd", "9999"}, disk...), "was not handed in"},
		"same socket":        {append(append([]string{"serve"}, disk...), disk...), "socket /nonexistent/s is already the export of disk /nonexistent/d"},
		"doctor flag":        {[]string{"doctor", "--frobnicate"}, "unknown flag"},
		"version argument":   {[]string{"version", "x"}, "unexpected argument"},
	} {
		t.Run(name, func(t *testing.T) {
			var out, errs bytes.Buffer
			status := Main(c.args, Streams{Out: &out, Err: &errs})
			if status != exitUsage || !strings.Contains(errs.String(), c.want) || !strings.Contains(errs.String(), "--help'") {
				t.Errorf("status %d, standard error:\n%s\nwant status 2 and %q", status, errs.String(), c.want)
			}
		})
	}
}

func TestHelpIsComplete(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"serve", "--help"}, {"doctor", "--help"}, {"version", "--help"}, {"completion", "bash"}, {"version"}} {
		var out, errs bytes.Buffer
		if status := Main(args, Streams{Out: &out, Err: &errs}); status != exitOK || out.Len() == 0 || errs.Len() != 0 {
			t.Errorf("%v: status %d, %d bytes on standard output, standard error %q", args, status, out.Len(), errs.String())
		}
	}
}
