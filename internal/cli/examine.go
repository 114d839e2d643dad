// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-blk/sluice/internal/daemon"
	"github.com/sluice-blk/sluice/internal/graph"
)

// fileReport is what doctor says of one file or block device.
type fileReport struct {
	Path       string `json:"path"`
	Error      string `json:"error,omitempty"`
	Format     string `json:"format,omitempty"` // that it begins as; empty: none that is known, which makes it raw
	Size       int64  `json:"size"`
	Align      int    `json:"align"`     // of offsets and lengths, as the file is opened by default
	MemAlign   int    `json:"mem_align"` // of addresses
	Logical    int    `json:"logical_block"`
	Physical   int    `json:"physical_block"`
	Engine     string `json:"engine"` // with the reason
	Durability string `json:"durability"`
	Remedy     string `json:"remedy,omitempty"`
}

// examine opens a file read-only, without a lock, as serve would by default, and closes it again.
func examine(path string) fileReport {
	r := fileReport{Path: path}
	if err := r.look(); err != nil {
		r.Error = err.Error()
	}
	return r
}

func (r *fileReport) look() error {
	const enough = 30 * time.Second // opening asks the file a few questions; a dead network file system may never answer
	ctx, cancel := context.WithTimeout(context.Background(), enough)
	defer cancel()
	loops, err := daemon.StartLoops(ctx, nil)
	if err != nil {
		return err
	}
	defer loops.Stop()
	c := daemon.DiskConfig{Path: r.Path, ReadOnly: true, Lock: graph.LockShared}
	if format, err := graph.Recognise(r.Path, graph.AnyPath); err == nil && format != graph.FormatRaw {
		r.Format = format
	}
	if r.Format == graph.FormatQcow2 {
		c.Format, c.Backing = r.Format, "off"
	}
	d, err := daemon.OpenDisk(ctx, &c, loops.All())
	if err != nil {
		return err
	}
	i, node := d.Handle().Info(), d.Handle().Node().Info()
	r.Size, r.Align, r.MemAlign = i.Size, node.Align, node.MemAlign
	r.Logical, r.Physical, r.Engine, r.Durability = i.LogicalBlock, i.PhysicalBlock, i.Engine, i.Durability
	if strings.Contains(i.Engine, "io_uring is not the loop's poller") {
		r.Remedy = "make io_uring available, see above"
	}
	return d.Close(ctx)
}

func (r *fileReport) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n%s\n", r.Path)
	if r.Error != "" {
		fmt.Fprintf(b, "  error       %s\n", r.Error)
		return
	}
	switch r.Format {
	case "":
	case graph.FormatQcow2:
		fmt.Fprintf(b, "  format      qcow2 (serve it with format=qcow2)\n")
	default:
		fmt.Fprintf(b, "  format      begins as a %s image; what follows is of its raw bytes\n", r.Format)
	}
	fmt.Fprintf(b, "  size        %s (%d bytes)\n", formatSize(r.Size), r.Size)
	fmt.Fprintf(b, "  alignment   %s\n", alignText(r.Align, r.MemAlign))
	fmt.Fprintf(b, "  blocks      %d bytes logical, %d physical\n", r.Logical, r.Physical)
	for i, line := range wrap(r.Engine, 66) {
		title := ""
		if i == 0 {
			title = "engine"
		}
		fmt.Fprintf(b, "  %-11s %s\n", title, line)
	}
	fmt.Fprintf(b, "  durability  %s\n", r.Durability)
	if r.Remedy != "" {
		fmt.Fprintf(b, "  to change it: %s\n", r.Remedy)
	}
}

func alignText(align, mem int) string {
	if align <= 1 && mem <= 1 {
		return "none needed"
	}
	return fmt.Sprintf("%d bytes for offsets and lengths, %d for memory; guests' other requests go through aligned memory", align, mem)
}
