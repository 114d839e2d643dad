// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sluice-blk/sluice/internal/sys"
)

// askQueue reads the limits that the kernel tells of a block device in sysfs. What is not told is not known, which for
// discard means that it is not offered.
func (f *opened) askQueue(rdev uint64) {
	major, minor := sys.DeviceNumber(rdev)
	dir := fmt.Sprintf("/sys/dev/block/%d:%d", major, minor)
	f.protected = readNumber(dir, "ro") == 1
	queue := filepath.Join(dir, "queue")
	if _, err := os.Stat(queue); err != nil {
		// A partition: the queue is the whole disk's, whose directory is the parent of the one that the link names.
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			return
		}
		queue = filepath.Join(filepath.Dir(real), "queue")
	}
	f.optimal = int(readNumber(queue, "optimal_io_size"))
	f.discardMax = readNumber(queue, "discard_max_bytes")
	f.discardAlign = readNumber(queue, "discard_granularity")
	f.discard = f.discardMax > 0
}

// readNumber reads one of the kernel's one-number files. It is 0 when there is none.
func readNumber(dir, name string) int64 {
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}
