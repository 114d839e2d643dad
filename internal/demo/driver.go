// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"

	"github.com/sluice-blk/sluice/internal/bench"
)

// workWithDriver does the same jobs with the built-in driver: verified writes on the work disk, and the series' job, its
// four jobs of depth 64 being as many virtqueues as the disk has.
func (d *demo) workWithDriver(ctx context.Context) error {
	w := bench.Workload{RW: "randrw", IODepth: 32, NumJobs: 1, Runtime: d.o.Runtime, Verify: true, Fsync: 64}
	res, err := bench.Run(ctx, d.socket(0), w)
	if err != nil {
		return fmt.Errorf("verified random writes: %w", err)
	}
	d.check("verified random reads and writes by the built-in driver: %d requests, %d blocks compared, %d flushes",
		res.IOs(), res.Verified, res.Flushes)
	for i := range d.rows {
		w := bench.Workload{RW: "randread", IODepth: 64, NumJobs: d.o.CPUs, Runtime: d.o.Runtime}
		res, err := bench.Run(ctx, d.socket(d.rowDisk(i)), w)
		if err != nil {
			return fmt.Errorf("random reads with %v: %w", d.rows[i].Engine, err)
		}
		d.rows[i].IOPS, d.rows[i].P50, d.rows[i].P99 = res.IOPS(), res.Read.P50, res.Read.P99
	}
	return d.count(ctx)
}
