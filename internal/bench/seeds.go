// SPDX-License-Identifier: Apache-2.0

package bench

// Series is one set of tables.
type Series struct {
	ID     string
	Title  string
	Setups []Setup
}

// Seeds are the three sets of tables that the work on batching started from: what a batch saves at all, what it saves
// where, and what the engines and the loops make of it. In the third each row has two queues, which share a loop
// (loops=1) or have a loop of their own each (loops=2).
var Seeds = []Series{
	{"1", "batching off and on: four jobs of depth 64", []Setup{
		{Medium: "null", RW: "randread", Depth: 64, Queues: 4, Batch: true},
		{Medium: "shm", RW: "randread", Depth: 64, Queues: 4, Batch: true},
		{Medium: "disk", RW: "randread", Depth: 64, Queues: 4, Batch: true},
	}},
	{"2", "batching off and on: memory and disk, reads and writes", []Setup{
		{Medium: "shm", RW: "randread", Depth: 64, Batch: true},
		{Medium: "shm", RW: "randwrite", Depth: 64, Batch: true},
		{Medium: "disk", RW: "randread", Depth: 64, Batch: true},
		{Medium: "disk", RW: "randwrite", Depth: 64, Batch: true},
	}},
	{"3", "engines, depths, and loops shared or own", []Setup{
		{Medium: "disk", RW: "randread", Depth: 1, Queues: 2, Engines: []string{"linux-aio", "io_uring"}},
		{Medium: "disk", RW: "randread", Depth: 64, Queues: 2, Engines: []string{"linux-aio", "io_uring"}},
		{Medium: "disk", RW: "randwrite", Depth: 1, Queues: 2, Engines: []string{"linux-aio", "io_uring"}},
		{Medium: "disk", RW: "randwrite", Depth: 64, Queues: 2, Engines: []string{"linux-aio", "io_uring"}},
	}},
}
