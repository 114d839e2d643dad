// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"strings"

	"github.com/sluice-blk/sluice/internal/daemon"
)

// writeDisk is the inverse of parseDisk.
func writeDisk(d daemon.DiskConfig) string {
	var items []string
	add := func(present bool, key string, value any) {
		if present {
			items = append(items, key+"="+strings.ReplaceAll(fmt.Sprint(value), ",", ",,"))
		}
	}
	add(d.Path != "", "path", d.Path)
	add(d.Driver != "", "driver", d.Driver)
	add(d.Format != "", "format", d.Format)
	add(d.Size != 0, "size", d.Size)
	add(d.Offset != 0, "offset", d.Offset)
	add(d.ReadOnly, "readonly", "on")
	add(d.Engine != 0, "engine", d.Engine)
	add(d.Cache != 0, "cache", d.Cache)
	add(d.Lock != "", "lock", d.Lock)
	add(d.NoDiscard, "discard", "ignore")
	add(d.KeepOnDiscard, "discard", "keep")
	add(d.Backing != "", "backing", d.Backing)
	add(d.DataFile != "", "data-file", d.DataFile)
	add(d.Snapshot != "", "snapshot", d.Snapshot)
	add(d.L2CacheSize != 0, "l2-cache-size", d.L2CacheSize)
	add(d.RefcountCacheSize != 0, "refcount-cache-size", d.RefcountCacheSize)
	add(d.FileFault != "", "file-fault", d.FileFault)
	add(d.Coalesce != 0, "coalesce", d.Coalesce)
	add(d.Latency != 0, "latency", d.Latency)
	add(d.Fault != "", "fault", d.Fault)
	add(d.Serial != "", "serial", d.Serial)
	var groups []string
	for _, g := range d.Groups {
		groups = append(groups, fmt.Sprintf("%d@%d-%d", g.Queues, g.First, g.Last))
	}
	add(d.Queues != 0 && d.Groups == nil, "queues", d.Queues)
	add(d.Groups != nil, "queues", strings.Join(groups, "+"))
	add(d.NoMerge, "merge", "off")
	add(d.LogicalBlock != 0, "logical-block-size", d.LogicalBlock)
	return strings.Join(items, ",")
}
