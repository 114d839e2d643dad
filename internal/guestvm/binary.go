// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bufio"
	"context"
	"debug/elf"
	"fmt"
	"os/exec"
	"strings"
)

// checkGuestBinary refuses what an x86-64 guest cannot run and tells whether the program needs a dynamic linker.
func checkGuestBinary(file string) (dynamic bool, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return false, fmt.Errorf("pack %s: %w", file, err)
	}
	defer f.Close()
	if f.Machine != elf.EM_X86_64 {
		return false, fmt.Errorf("pack %s: a program for %v, the guest is x86-64", file, f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return true, nil
		}
	}
	return false, nil
}

// sharedLibraries asks ldd(1) for the libraries of a dynamic program, its dynamic linker among them. ldd runs the
// linker on the program: name only programs that you would run yourself.
func sharedLibraries(ctx context.Context, file string) ([]string, error) {
	cmd := exec.CommandContext(ctx, "ldd", file)
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/bin:/bin"}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list shared libraries of %s: ldd: %w", file, err)
	}
	libs, err := parseLdd(string(out))
	if err != nil {
		return nil, fmt.Errorf("list shared libraries of %s: %w", file, err)
	}
	return libs, nil
}

// parseLdd takes the absolute paths out of ldd's lines: "name => /path (0x...)" and, for the linker, "/path (0x...)".
// The vdso, which has no path, is the kernel's.
func parseLdd(out string) ([]string, error) {
	var libs []string
	for s := bufio.NewScanner(strings.NewReader(out)); s.Scan(); {
		name, target, arrow := strings.Cut(strings.TrimSpace(s.Text()), " => ")
		if !arrow {
			target = name
		}
		if strings.HasPrefix(target, "not found") {
			return nil, fmt.Errorf("library %s is not found", name)
		}
		if lib, _, _ := strings.Cut(target, " ("); strings.HasPrefix(lib, "/") {
			libs = append(libs, lib)
		}
	}
	return libs, nil
}
