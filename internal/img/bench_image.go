// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"fmt"
	"io"
	"time"
	"unsafe"
)

// BenchRequest is what a person asks of bench.
type BenchRequest struct {
	Bench
	Source  Source
	Options DiskOptions
	Out     io.Writer // told what is going to be done; nil: nobody
}

// Run opens the image and runs the bench on it.
func (r *BenchRequest) Run(ctx context.Context) (took time.Duration, err error) {
	loops, err := StartLoops(1)
	if err != nil {
		return 0, err
	}
	defer loops.Stop()
	if r.Disk, err = OpenDisk(ctx, loops.At(0), r.Source, r.Options); err != nil {
		return 0, err
	}
	defer func() { err = closeAll(err, r.Disk) }()
	r.announce()
	return r.Bench.Run(ctx)
}

func (r *BenchRequest) announce() {
	what, step := "read", r.Step
	if r.Write {
		what = "write"
	}
	if step == 0 {
		step = r.Size
	}
	fmt.Fprintf(r.Out, "Sending %d %s requests, %d bytes each, %d in parallel (starting at offset %d, step size %d)\n",
		r.Count, what, r.Size, r.Depth, r.Offset, step)
	if r.FlushInterval > 0 {
		fmt.Fprintf(r.Out, "Sending flush every %d requests\n", r.FlushInterval)
	}
}

// alignedBytes is memory that direct I/O can use.
func alignedBytes(n int64) []byte {
	b := make([]byte, n+benchAlign)
	// SAFETY: the address is looked at as a number and never turned back into a pointer.
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (benchAlign - 1)
	return b[skip:][:n]
}
