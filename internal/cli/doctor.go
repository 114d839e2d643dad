// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// finding is one thing that doctor looked at.
type finding struct {
	Name   string `json:"name"`
	State  state  `json:"state"`
	Value  string `json:"value"`            // what was found
	Effect string `json:"effect,omitempty"` // what follows from it
	Remedy string `json:"remedy,omitempty"` // the command that would change it
}

// state tells whether a finding keeps sluice from doing its best.
type state string

const (
	stateOK   state = "ok"
	stateNote state = "note" // works, and could be better
	stateLack state = "lack" // something will not work
)

// report is all that doctor says.
type report struct {
	Version  string       `json:"version"`
	Findings []finding    `json:"findings"`
	Features []feature    `json:"io_uring_features"`
	Files    []fileReport `json:"files"`
}

func newDoctor(s Streams) *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "doctor [PATH...]",
		Short: "Tell what this machine offers and what will be chosen",
		Long: strings.TrimSpace(`
Look at this machine, and at the files and block devices named, and tell what
sluice serve would choose, why not the better one, and the command that would
change it. Nothing is changed, and no file is locked or written.

Exit status: 0 however much is lacking, 1 when a PATH cannot be looked at.`),
		Example: `  sluice doctor
  sluice doctor disk.raw /dev/vg/data
  sluice doctor --json disk.raw | jq .files`,
		RunE: verb(func(_ *cobra.Command, args []string) error { return doctor(s.Out, args, asJSON) }),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the same as one JSON object")
	return cmd
}

func doctor(w io.Writer, paths []string, asJSON bool) error {
	m := lookAround()
	r := report{Version: versionLine(), Findings: m.diagnose(), Features: m.features, Files: []fileReport{}}
	failed := 0
	for _, path := range paths {
		f := examine(path)
		if f.Error != "" {
			failed++
		}
		r.Files = append(r.Files, f)
	}
	var err error
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		err = e.Encode(r)
	} else {
		_, err = io.WriteString(w, r.text())
	}
	if err == nil && failed > 0 {
		err = fmt.Errorf("%d of %d paths could not be looked at", failed, len(paths))
	}
	return err
}

// text is the report for people.
func (r *report) text() string {
	var b strings.Builder
	for _, f := range r.Findings {
		writeFinding(&b, &f)
	}
	if len(r.Features) > 0 {
		b.WriteString("\nio_uring features\n")
		for _, f := range r.Features {
			mark := "yes"
			if !f.Available {
				mark = "no "
			}
			fmt.Fprintf(&b, "  %s  %-16s Linux %-5s %s\n", mark, f.Name, f.Since, f.Use)
		}
	}
	for i := range r.Files {
		r.Files[i].write(&b)
	}
	return b.String()
}

func writeFinding(b *strings.Builder, f *finding) {
	fmt.Fprintf(b, "%-5s %-18s %s\n", f.State, f.Name, f.Value)
	for _, line := range wrap(f.Effect, 72) {
		if line != "" {
			fmt.Fprintf(b, "      %s\n", line)
		}
	}
	if f.Remedy != "" {
		fmt.Fprintf(b, "      to change it: %s\n", f.Remedy)
	}
}
