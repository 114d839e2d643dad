// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestImgFlagsReadLikeGetopt(t *testing.T) {
	type got struct {
		Format, Output string
		Quiet, Force   bool
		Options, Rest  []string
	}
	for _, c := range []struct {
		args string
		want got
		err  string
	}{
		{args: "a -f raw b", want: got{Format: "raw", Rest: []string{"a", "b"}}},
		{args: "-fraw -q", want: got{Format: "raw", Quiet: true}},
		{args: "-qfraw", want: got{Format: "raw", Quiet: true}},
		{args: "-qf raw", want: got{Format: "raw", Quiet: true}},
		{args: "-o a=1 -ob=2", want: got{Options: []string{"a=1", "b=2"}}},
		{args: "--output=json", want: got{Output: "json"}},
		{args: "--out json --force", want: got{Output: "json", Force: true}},
		{args: "-q -- -f raw", want: got{Quiet: true, Rest: []string{"-f", "raw"}}},
		{args: "- -q", want: got{Quiet: true, Rest: []string{"-"}}},
		{args: "-Z", err: "unrecognized option '-Z'"},
		{args: "--nope", err: "unrecognized option '--nope'"},
		{args: "--o json", err: "unrecognized option '--o'"}, // object or output
		{args: "--quiet=1", err: "unrecognized option '--quiet=1'"},
		{args: "-f", err: "missing argument for option '-f'"},
		{args: "--output", err: "missing argument for option '--output'"},
	} {
		var g got
		var errs bytes.Buffer
		call := &imgCall{Streams: Streams{Err: &errs}, tool: "x"}
		f := call.flags()
		f.text('f', "", &g.Format)
		f.text(0, "output", &g.Output)
		f.on('q', "quiet", &g.Quiet)
		f.on('U', "force-share", &g.Force)
		f.options(&g.Options)
		f.objects()
		rest, ok := f.parse(strings.Fields(c.args))
		g.Rest = rest
		switch {
		case c.err != "" && (ok || !strings.HasPrefix(errs.String(), "x: "+c.err+"\n")):
			t.Errorf("%q: said %q, want %q", c.args, errs.String(), c.err)
		case c.err == "" && (!ok || !cmp.Equal(g, c.want)):
			t.Errorf("%q: %s%s", c.args, errs.String(), cmp.Diff(c.want, g))
		}
	}
}
