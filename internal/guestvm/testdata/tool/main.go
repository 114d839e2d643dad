// SPDX-License-Identifier: Apache-2.0

// Command tool is a static program that the package's tests pack into a guest: it prints the file that was packed
// beside it.
package main

import (
	"fmt"
	"os"
)

func main() {
	data, err := os.ReadFile(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("tool read %s", data)
}
