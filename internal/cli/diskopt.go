// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/daemon"
	"github.com/sluice-blk/sluice/internal/node/fault"
)

// diskKey is one key of a --disk argument.
type diskKey struct {
	name string
	bare string // value that the key alone stands for; empty when it needs one
	want string // what the value looks like
	help string
	set  func(d *daemon.DiskConfig, v string) error
}

// diskKeys is the whole vocabulary of --disk, in the order in which messages and the help text list it.
var diskKeys = []diskKey{
	{"format", "", "raw|qcow2|vmdk|vhdx|vpc|vdi|probe", "raw takes the bytes as they are (the default); qcow2 is QEMU's image format; vmdk, vhdx, vpc and vdi are only read, and need readonly; probe takes the bytes as they are, too, but refuses a file that looks like an image of another format", setFormat},
	{"driver", "", "file|null|mem", "null answers without storing, mem stores in memory; both need size= and take no path", setDriver},
	{"path", "", "PATH", "the path, for one that could be mistaken for a key", func(d *daemon.DiskConfig, v string) error { d.Path = v; return nil }},
	{"backing", "", "on|off|probe", "for qcow2: whether what stands behind the image is opened; on wants the image to name its format, probe guesses one that is not named, off shows zeros for what the image itself does not hold (default: on)", setBacking},
	{"data-file", "", "PATH", "for qcow2: external data file, in place of the one that the image names", func(d *daemon.DiskConfig, v string) error { d.DataFile = v; return nil }},
	{"snapshot", "", "NAME", "for qcow2: show this internal snapshot, by its ID or name; needs readonly", func(d *daemon.DiskConfig, v string) error { d.Snapshot = v; return nil }},
	{"l2-cache-size", "", "SIZE", "for qcow2: memory for tables of places; 1M covers 8 GiB of a disk of 64 KiB clusters, 4 GiB with extended entries (default: enough for the whole disk, at most 32M)", setBytes(func(d *daemon.DiskConfig) *int64 { return &d.L2CacheSize })},
	{"refcount-cache-size", "", "SIZE", "for qcow2: memory for reference counts; 1M covers 32 GiB of a file of 64 KiB clusters (default: a quarter of l2-cache-size)", setBytes(func(d *daemon.DiskConfig) *int64 { return &d.RefcountCacheSize })},
	{"size", "", "SIZE", "size of a null or mem disk; for a file, how much of it is the disk", setBytes(func(d *daemon.DiskConfig) *int64 { return &d.Size })},
	{"offset", "", "SIZE", "where in the file, or in the disk of an image, the disk begins", setBytes(func(d *daemon.DiskConfig) *int64 { return &d.Offset })},
	{"readonly", "on", "on|off", "offer the disk read-only and open its file read-only", setSwitch(func(d *daemon.DiskConfig) *bool { return &d.ReadOnly })},
	{"engine", "", "auto|io_uring|linux-aio|threads", "how requests reach the kernel; auto asks the file", setEngine},
	{"cache", "", "none|writeback|writethrough|unsafe", "none is O_DIRECT, the default where the file allows it; writethrough completes a write when it is durable; unsafe ignores flushes", setCache},
	{"queues", "", "N[@LOOPS][+N@LOOPS...]", "queues offered to the guest, 1 to 256 (default: one a loop), spread over all loops, or over those named: 8@0-1 is eight on loops 0 and 1 in turn, 1@0+4@2-3 the first on loop 0 and four more on loops 2 and 3", setQueues},
	{"merge", "", "on|off", "whether reads, or writes, that lie side by side and are found in the queue at the same time go to the disk as one (default: on)", setMerge},
	{"serial", "", "TEXT", "serial number, at most 20 bytes", setSerial},
	{"logical-block-size", "", "512|1024|2048|4096", "the guest's sector size in bytes", setLogicalBlock},
	{"discard", "", "unmap|ignore|keep", "whether the guest may give space back (default: unmap); keep, for qcow2, has discarded clusters read as zeros and leaves them where they are, so that the file does not become scattered", setDiscard},
	{"lock", "", "on|off|shared", "lock the image as QEMU does (on); shared looks on without a lock and needs readonly", setLock},
	{"coalesce", "", "DURATION", "for how long at most a notification waits for more completions to share it (such as 100us; default: 0)", setDuration(func(d *daemon.DiskConfig) *time.Duration { return &d.Coalesce })},
	{"latency", "", "DURATION", "for driver=null: how long each request takes (such as 100us)", setDuration(func(d *daemon.DiskConfig) *time.Duration { return &d.Latency })},
	{"file-fault", "", "TEXT", "for tests, with qcow2: the same as fault, for what the format asks of the file", setFileFault},
	{"fault", "", "TEXT", "for tests: make requests fail or wait, such as read 4096-8191 error=EIO count=1; write delay=10ms", setFault},
}

func findDiskKey(name string) *diskKey {
	for i := range diskKeys {
		if diskKeys[i].name == name {
			return &diskKeys[i]
		}
	}
	return nil
}

func diskKeyNames() string {
	names := make([]string, len(diskKeys))
	for i := range diskKeys {
		names[i] = diskKeys[i].name
	}
	return strings.Join(names, ", ")
}

// splitOptions cuts s at single commas; a doubled comma stands for one comma in the item.
func splitOptions(s string) []string {
	var items []string
	var item strings.Builder
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] != ',':
			item.WriteByte(s[i])
		case i+1 < len(s) && s[i+1] == ',':
			item.WriteByte(',')
			i++
		default:
			items = append(items, item.String())
			item.Reset()
		}
	}
	return append(items, item.String())
}

// parseDisk reads PATH[,key=value...], or driver=null|mem,size=SIZE[,key=value...].
func parseDisk(s string) (daemon.DiskConfig, error) {
	var d daemon.DiskConfig
	seen := make(map[string]bool)
	for i, item := range splitOptions(s) {
		name, value, hasValue := strings.Cut(item, "=")
		key := findDiskKey(name)
		switch {
		case i == 0 && (!hasValue || key == nil):
			if err := setFirst(&d, item); err != nil {
				return d, err
			}
			continue
		case item == "":
			return d, fmt.Errorf("an option is empty (a comma in a value is written twice)")
		case key == nil:
			return d, unknownKey(name)
		case seen[name]:
			return d, fmt.Errorf("%s is given twice", name)
		case name == "path" && d.Path != "":
			return d, fmt.Errorf("path is given twice")
		}
		seen[name] = true
		if err := key.parse(&d, value, hasValue); err != nil {
			return d, err
		}
	}
	// Which loops there are is another flag's to say, and is checked when all are known.
	one := daemon.Config{Loops: make([]daemon.LoopConfig, daemon.LoopsMax), Disks: []daemon.DiskConfig{d}}
	return d, one.Validate()
}

// setFirst takes the first item, which is the path unless it looks like a key that does not exist.
func setFirst(d *daemon.DiskConfig, item string) error {
	name, _, hasValue := strings.Cut(item, "=")
	if hasValue && name != "" && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz-") == "" {
		return fmt.Errorf("%w; a path with '=' in it is written path=%s", unknownKey(name), strings.ReplaceAll(item, ",", ",,"))
	}
	if item == "" {
		return fmt.Errorf("no path is given")
	}
	d.Path = item
	return nil
}

func unknownKey(name string) error {
	return fmt.Errorf("unknown key %q (known keys: %s)", name, diskKeyNames())
}

func (k *diskKey) parse(d *daemon.DiskConfig, value string, hasValue bool) error {
	if !hasValue {
		if k.bare == "" {
			return fmt.Errorf("%s needs a value (%s=%s)", k.name, k.name, k.want)
		}
		value = k.bare
	}
	if value == "" {
		return fmt.Errorf("%s is empty (want %s)", k.name, k.want)
	}
	if err := k.set(d, value); err != nil {
		return fmt.Errorf("%s: %w", k.name, err)
	}
	return nil
}

// setQueues reads N, or N@FIRST-LAST and further such groups behind a plus.
func setQueues(d *daemon.DiskConfig, v string) error {
	if !strings.Contains(v, "@") && !strings.Contains(v, "+") {
		n, err := parseCount(v, 1, daemon.QueuesMax)
		d.Queues = n
		return err
	}
	for _, text := range strings.Split(v, "+") {
		g, err := parseGroup(text)
		if err != nil {
			return err
		}
		d.Groups = append(d.Groups, g)
		d.Queues += g.Queues
	}
	return nil
}

func parseGroup(s string) (g daemon.QueueGroup, err error) {
	count, loops, ok := strings.Cut(s, "@")
	if !ok {
		return g, fmt.Errorf("%q names no loops (want N@LOOP or N@FIRST-LAST, such as 4@0-1)", s)
	}
	if g.Queues, err = parseCount(count, 1, daemon.QueuesMax); err != nil {
		return g, err
	}
	first, last, isRange := strings.Cut(loops, "-")
	if !isRange {
		last = first
	}
	if g.First, err = parseCount(first, 0, daemon.LoopsMax-1); err != nil {
		return g, fmt.Errorf("loops of %q: %w", s, err)
	}
	if g.Last, err = parseCount(last, 0, daemon.LoopsMax-1); err != nil {
		return g, fmt.Errorf("loops of %q: %w", s, err)
	}
	return g, nil
}

func setMerge(d *daemon.DiskConfig, v string) error {
	on, err := parseSwitch(v)
	d.NoMerge = !on
	return err
}

func setFormat(d *daemon.DiskConfig, v string) error {
	switch v {
	case "raw", "qcow2", "vmdk", "vhdx", "vpc", "vdi", "probe":
		d.Format = v
		return nil
	}
	return fmt.Errorf("unknown format %q (want raw, qcow2, vmdk, vhdx, vpc, vdi or probe)", v)
}

func setDriver(d *daemon.DiskConfig, v string) error {
	switch v {
	case "file", "null", "mem":
		d.Driver = v
		return nil
	}
	return fmt.Errorf("unknown driver %q (want file, null or mem)", v)
}

func setEngine(d *daemon.DiskConfig, v string) (err error) {
	d.Engine, err = aio.ParseEngine(v)
	return err
}

func setCache(d *daemon.DiskConfig, v string) (err error) {
	d.Cache, err = block.ParseCacheMode(v)
	return err
}

func setDiscard(d *daemon.DiskConfig, v string) error {
	switch v {
	case "unmap", "ignore", "keep":
		d.NoDiscard, d.KeepOnDiscard = v == "ignore", v == "keep"
		return nil
	}
	return fmt.Errorf("unknown value %q (want unmap, ignore or keep)", v)
}

func setBacking(d *daemon.DiskConfig, v string) error {
	switch v {
	case "on", "off", "probe":
		d.Backing = v
		return nil
	}
	return fmt.Errorf("unknown value %q (want on, off or probe)", v)
}

func setLock(d *daemon.DiskConfig, v string) error {
	switch v {
	case "on", "off", "shared":
		d.Lock = v
		return nil
	}
	return fmt.Errorf("unknown value %q (want on, off or shared)", v)
}

func setSerial(d *daemon.DiskConfig, v string) error {
	if len(v) > daemon.SerialMax {
		return fmt.Errorf("%q has %d bytes, a guest can read %d", v, len(v), daemon.SerialMax)
	}
	d.Serial = v
	return nil
}

func setLogicalBlock(d *daemon.DiskConfig, v string) error {
	n, err := parseSize(v)
	if err != nil {
		return err
	}
	switch n {
	case 512, 1024, 2048, 4096:
		d.LogicalBlock = int(n)
		return nil
	}
	return fmt.Errorf("%s is not 512, 1024, 2048 or 4096", v)
}

// setFault reads the text once to find its mistakes now.
func setFault(d *daemon.DiskConfig, v string) error {
	d.Fault = v
	_, err := fault.New(nil, v)
	return err
}

func setFileFault(d *daemon.DiskConfig, v string) error {
	d.FileFault = v
	_, err := fault.New(nil, v)
	return err
}

func setDuration(field func(*daemon.DiskConfig) *time.Duration) func(*daemon.DiskConfig, string) error {
	return func(d *daemon.DiskConfig, v string) error {
		t, err := time.ParseDuration(v)
		if err != nil || t < 0 {
			return fmt.Errorf("%q is not a duration (such as 100us or 2ms)", v)
		}
		*field(d) = t
		return nil
	}
}

func setBytes(field func(*daemon.DiskConfig) *int64) func(*daemon.DiskConfig, string) error {
	return func(d *daemon.DiskConfig, v string) error {
		n, err := parseSize(v)
		if err != nil {
			return err
		}
		*field(d) = n
		return nil
	}
}

func setSwitch(field func(*daemon.DiskConfig) *bool) func(*daemon.DiskConfig, string) error {
	return func(d *daemon.DiskConfig, v string) error {
		on, err := parseSwitch(v)
		*field(d) = on
		return err
	}
}

// parseSwitch reads on or off.
func parseSwitch(s string) (bool, error) {
	switch s {
	case "on":
		return true, nil
	case "off":
		return false, nil
	}
	return false, fmt.Errorf("%q is neither on nor off", s)
}

// parseCount reads a plain number between least and most.
func parseCount(s string, least, most int) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil || n > math.MaxInt32 || int(n) < least || int(n) > most {
		return 0, fmt.Errorf("%q is not a number from %d to %d", s, least, most)
	}
	return int(n), nil
}
