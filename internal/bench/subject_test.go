// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestCommandLinesOfSubjects(t *testing.T) {
	file, image, null := Medium{Path: "/d/a,b"}, Medium{Path: "/d/q", Format: "qcow2"}, Medium{}
	for _, c := range []struct {
		s    Subject
		name string
		args string
	}{
		{Sluice{Program: "s"}.Subject(null, 1), "sluice",
			"s serve --log-format json --disk driver=null,size=1073741824,queues=1 --vhost-user %S"},
		{Sluice{Program: "s", Engine: "io_uring", Batch: "off", Loops: 2, More: []string{"--pin"}, Keys: []string{"merge=on"}}.Subject(file, 4),
			"sluice io_uring batch=off loops=2 --pin merge=on",
			"s serve --log-format json --batch off --loops 2 --pin --disk /d/a,,b,engine=io_uring,cache=none,merge=on,queues=4 --vhost-user %S"},
		{Storaged{Program: "q", AIO: "native"}.Subject(null, 1), "qemu-storage-daemon null-co",
			"q --blockdev driver=null-co,node-name=d,size=1073741824,read-zeroes=off " +
				"--export type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=%S,writable=on,num-queues=1"},
		{Storaged{Program: "q", AIO: "io_uring", IOThread: true}.Subject(file, 2), "qemu-storage-daemon aio=io_uring iothread",
			"q --blockdev driver=file,node-name=f,filename=/d/a,,b,cache.direct=on,aio=io_uring --blockdev driver=raw,node-name=d,file=f --object iothread,id=t " +
				"--export type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=%S,writable=on,num-queues=2,iothread=t"},
		{Sluice{Program: "s"}.Subject(image, 1), "sluice",
			"s serve --log-format json --disk /d/q,engine=auto,cache=none,format=qcow2,queues=1 --vhost-user %S"},
		{Storaged{Program: "q", AIO: "native"}.Subject(image, 1), "qemu-storage-daemon aio=native",
			"q --blockdev driver=file,node-name=f,filename=/d/q,cache.direct=on,aio=native --blockdev driver=qcow2,node-name=d,file=f " +
				"--export type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=%S,writable=on,num-queues=1"},
		{Command("mine", "prog  %F --socket=%S", file), "mine", "prog /d/a,b --socket=%S"},
	} {
		if got := strings.Join(c.s.Args, " "); c.s.Name != c.name || got != c.args {
			t.Errorf("got  %s: %s\nwant %s: %s", c.s.Name, got, c.name, c.args)
		}
	}
}

func TestConfigurationsOfThePeer(t *testing.T) {
	engines, loops := []string{"native", "io_uring"}, []string{"main", "iothread"}
	for m, want := range map[Medium]int{{Path: "/x"}: 4, {}: 2, {Path: "/x", Buffered: true}: 2} {
		if got := Configurations("q", m, engines, loops); len(got) != want {
			t.Errorf("%+v: %d configurations, want %d: %+v", m, len(got), want, got)
		}
	}
}

func TestFioDoesTheSameWork(t *testing.T) {
	w := Workload{RW: "randrw", IODepth: 64, NumJobs: 4, Runtime: 1500 * time.Millisecond, Size: 1 << 20, Fsync: 3}
	w.Defaults()
	args := Fio{Program: "fio", Engine: "io_uring", Batch: 16}.Subject(Medium{Path: "/x"}, &w).Args
	for _, want := range []string{"--rw=randrw", "--bs=4096", "--iodepth=64", "--numjobs=4", "--rwmixread=50", "--runtime=1500ms", "--size=1048576",
		"--fsync=3", "--direct=1", "--fixedbufs=1", "--registerfiles=1", "--iodepth_batch_submit=16", "--filename=/x"} {
		if !slices.Contains(args, want) {
			t.Errorf("%s is missing in %q", want, args)
		}
	}
	w.IODepth = 1
	if n := len(Fios("fio", &w)); n != 2 {
		t.Errorf("%d configurations at depth 1, where there is nothing to batch", n)
	}
}
