// SPDX-License-Identifier: Apache-2.0

// Writer is the guest's side of the tests that look at single writes. It runs inside the guest, static, as
//
//	writer stamp DEVICE SEED ROUND JOBS   write stamped sectors for ever, see stamp.Job
//	writer direct DEVICE OFFSET COUNT     COUNT plain O_DIRECT writes of 4 KiB from byte OFFSET on, one after the other
//
// With stamp it prints "writing" when it begins and, after each group of writes of a job and the fsync behind them,
// "flushed JOB COUNT": the first COUNT writes of that job must not be lost any more.
package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"github.com/sluice-blk/sluice/tests/guest/stamp"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Println("writer:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("see the package comment for the arguments")
	}
	f, err := os.OpenFile(args[1], os.O_RDWR|syscall.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	numbers := make([]int64, len(args)-2)
	for i, a := range args[2:] {
		if numbers[i], err = strconv.ParseInt(a, 10, 64); err != nil {
			return err
		}
	}
	switch {
	case args[0] == "stamp" && len(numbers) == 3:
		return stampForEver(f, uint64(numbers[0]), uint32(numbers[1]), int(numbers[2]))
	case args[0] == "direct" && len(numbers) == 2:
		return writeDirect(f, numbers[0], int(numbers[1]))
	}
	return fmt.Errorf("bad arguments %q", args)
}

func writeDirect(f *os.File, offset int64, count int) error {
	block := aligned(4096)
	for i := range count {
		if _, err := f.WriteAt(block, offset+int64(i*len(block))); err != nil {
			return err
		}
	}
	return nil
}

// stampForEver returns only when a job fails.
func stampForEver(f *os.File, seed uint64, round uint32, jobs int) error {
	fmt.Println("writing")
	failed := make(chan error)
	for j := range jobs {
		go func() { failed <- stampJob(f, stamp.NewJob(seed, round, j)) }()
	}
	return <-failed
}

func stampJob(f *os.File, job *stamp.Job) error {
	buf := aligned(stamp.SectorsMax * stamp.SectorSize)
	for n := 1; ; n++ {
		w := job.Next()
		if _, err := f.WriteAt(w.Fill(buf), w.Sector*stamp.SectorSize); err != nil {
			return err
		}
		if n%stamp.FlushEvery != 0 {
			continue
		}
		if err := f.Sync(); err != nil {
			return err
		}
		fmt.Printf("flushed %d %d\n", job.Number, n)
	}
}

// aligned is memory that O_DIRECT takes, whatever the device's block size.
func aligned(n int) []byte {
	const align = 4096
	b := make([]byte, n+align)
	// SAFETY: only the address's value is looked at; the slice below stays within b.
	skip := -int(uintptr(unsafe.Pointer(&b[0]))) & (align - 1)
	return b[skip : skip+n : skip+n]
}
