// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// WriteText prints the report: how the guest was run, what was checked, and the table.
func (r *Report) WriteText(w io.Writer) error {
	fmt.Fprintf(w, "\n%s\n", r.Guest)
	for _, c := range r.Checks {
		fmt.Fprintf(w, "  ok  %s\n", c)
	}
	fmt.Fprintf(w, "\n4k random reads, 4 jobs of depth 64, direct:\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "engine\tbatching\tIOPS\tp50 us\tp99 us\trequests/submission\trequests/notification\t")
	for _, row := range r.Rows {
		on := "off"
		if row.Batching {
			on = "on"
		}
		fmt.Fprintf(t, "%v\t%s\t%.0f\t%.0f\t%.0f\t%.1f\t%.1f\t\n", row.Engine, on, row.IOPS,
			float64(row.P50.Nanoseconds())/1e3, float64(row.P99.Nanoseconds())/1e3, row.PerSubmission, row.PerNotification)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if r.Emulated {
		fmt.Fprint(w, "\nThe guest is emulated: its processors are the limit, and IOPS and latency are theirs. What the disks do\n"+
			"stands in the last two columns, which the server counts; `sluice bench compare` measures without a guest.\n")
	}
	_, err := fmt.Fprintf(w, "\ndone in %.0f s\n", r.Duration.Seconds())
	return err
}
