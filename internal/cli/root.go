// SPDX-License-Identifier: Apache-2.0

// Package cli is the command line: one file a verb. It turns flags into configurations, errors into messages and exit
// statuses, and owns what a process has one of: arguments, standard streams, signals. What is done is done below.
//
// Exit statuses are the same for all verbs: 0 when what was asked for was done, 1 when it failed, 2 when it could not be
// understood. The verbs of img have those of qemu-img.
package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// Exit statuses of the program.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

// Streams are where a verb reads and writes.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// Std are the process's own streams.
func Std() Streams { return Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr} }

// Main runs the command line args, which begin after the program's name, and answers the exit status.
func Main(args []string, s Streams) int {
	root := newRoot(s)
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	if err == nil {
		return exitOK
	}
	if said := new(status); errors.As(err, &said) {
		return said.code
	}
	fmt.Fprintf(s.Err, "sluice: %v\n", err)
	if failed := new(failure); errors.As(err, &failed) {
		return exitFailure
	}
	fmt.Fprintf(s.Err, "See '%s --help'.\n", cmd.CommandPath())
	return exitUsage
}

func newRoot(s Streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "sluice",
		Short: "Virtual disks for virtual machines",
		Long: strings.TrimSpace(`
sluice serves virtual disks to virtual machines. A disk is a raw file, a block
device or memory; a guest's virtio-blk driver reaches it over vhost-user.

Exit status: 0 done, 1 failed, 2 the command line could not be understood.`),
		Example: `  sluice serve --disk disk.raw --vhost-user /run/disk.sock
  sluice doctor disk.raw
  sluice serve --help`,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cmd.Help(); err != nil {
				return fail(err)
			}
			return errors.New("no command is given")
		},
	}
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	root.Version = versionLine()
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetHelpCommand(&cobra.Command{Use: "no-help", Hidden: true}) // --help says it all
	root.AddCommand(newServe(s), newBench(s), newCtl(s), newDemo(s), newDoctor(s), newImg(s), newVersion(s))
	return root
}

// noArgs refuses arguments. cobra's own answer calls them unknown commands.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("unexpected argument %q (%s takes flags only; a value that may be left out is joined to its flag by '=')", args[0], cmd.CommandPath())
}

// failure marks an error that is not the command line's.
type failure struct{ error }

func (f *failure) Unwrap() error { return f.error }

// fail marks err as a failure of what was asked for, and leaves nil and usage errors as they are.
func fail(err error) error {
	if err == nil {
		return nil
	}
	if u := new(usage); errors.As(err, &u) {
		return err
	}
	return &failure{err}
}

// usage marks an error that the command line made, found while the verb was at work already.
type usage struct{ error }

func (u *usage) Unwrap() error { return u.error }

// verb wraps the work of a command: whatever it answers, other than a usage error, is a failure.
func verb(work func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error { return fail(work(cmd, args)) }
}
