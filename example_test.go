// SPDX-License-Identifier: Apache-2.0

package sluice_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-blk/sluice"
	"github.com/sluice-blk/sluice/aio"
)

// An image is made, written, made durable and read.
func Example() {
	dir, err := os.MkdirTemp("", "sluice")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "disk.raw")
	if err := sluice.Create(path, 1<<20, nil); err != nil {
		log.Fatal(err)
	}

	d, err := sluice.Open(context.Background(), path, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	if _, err := d.WriteAt([]byte("hello"), 4096); err != nil {
		log.Fatal(err)
	}
	if err := d.Flush(); err != nil { // only now it would survive a loss of power
		log.Fatal(err)
	}
	p := make([]byte, 5)
	if _, err := d.ReadAt(p, 4096); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s, %d bytes\n", p, d.Size())
	// Output: hello, 1048576 bytes
}

// An image that somebody writes is refused, and can be looked at.
func ExampleOpen_inUse() {
	dir, err := os.MkdirTemp("", "sluice")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "disk.raw")
	if err := sluice.Create(path, 1<<20, &sluice.CreateOptions{Prealloc: sluice.PreallocFalloc}); err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	writer, err := sluice.Open(ctx, path, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer writer.Close()

	_, err = sluice.Open(ctx, path, nil)
	fmt.Println("in use:", errors.Is(err, sluice.ErrInUse))
	onlooker, err := sluice.Open(ctx, path, &sluice.Options{ReadOnly: true, Lock: sluice.LockShared})
	if err != nil {
		log.Fatal(err)
	}
	defer onlooker.Close()
	_, err = onlooker.WriteAt([]byte("x"), 0)
	fmt.Println("read-only:", errors.Is(err, sluice.ErrReadOnly))
	// Output:
	// in use: true
	// read-only: true
}

// Several disks share a loop, so that what they have to do leaves together.
func ExampleOptions_loops() {
	loop, err := aio.NewLoop(nil)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- loop.Run(ctx) }()

	o := &sluice.Options{Loops: []*aio.Loop{loop}}
	for range 2 {
		d, err := sluice.OpenMemory(ctx, 1<<20, o)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Size())
		if err := d.Close(); err != nil {
			log.Fatal(err)
		}
	}
	stop()
	fmt.Println(<-ended)
	// Output:
	// 1048576
	// 1048576
	// <nil>
}

// A disk is served to the virtual machine that connects to a socket, until the context ends.
func ExampleServer() {
	dir, err := os.MkdirTemp("", "sluice")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	d, err := sluice.OpenMemory(context.Background(), 1<<30, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()

	// qemu-system-x86_64 -chardev socket,id=c,path=.../disk.sock -device vhost-user-blk-pci,chardev=c ...
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	s := &sluice.Server{Logger: slog.Default()}
	err = s.ListenAndServeVhostUser(ctx, filepath.Join(dir, "disk.sock"), d, &sluice.VhostUserOptions{Serial: "SCRATCH"})
	fmt.Println(err)
	// Output: <nil>
}
