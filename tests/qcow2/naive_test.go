// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"fmt"
	"io"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// naive is an image in memory, read in the plainest way that the specification allows: no cache, no bound, no repair. It
// shares no code with the product, and judges it where starting a process for each question would take too long.
type naive struct {
	file    []byte
	data    []byte // of the external data file, if there is one
	backing []byte

	version      int
	clusterBits  uint
	cluster      int64
	size         int64
	l1Size       int64
	l1Offset     int64
	tableOffset  int64 // of refcounts
	tableBytes   int64
	refcountBits int64
	snapshots    []naiveSnapshot
	snapOffset   int64
	snapBytes    int64
	incompatible uint64
	autoclear    uint64
	compression  byte
	extL2        bool
	bitmaps      []byte // of the header extension
}

type naiveSnapshot struct {
	name             string
	l1Offset, l1Size int64
	size             int64
}

func openNaive(file, data, backing []byte) (*naive, error) {
	n := &naive{file: file, data: data, backing: backing}
	h := n.read(0, 112)
	if string(h[:4]) != "QFI\xfb" {
		return nil, fmt.Errorf("no magic")
	}
	u32 := func(at int) int64 { return int64(binary.BigEndian.Uint32(h[at:])) }
	u64 := func(at int) int64 { return int64(binary.BigEndian.Uint64(h[at:])) }
	n.version, n.clusterBits = int(u32(4)), uint(u32(20))
	n.cluster, n.size = 1<<n.clusterBits, u64(24)
	n.l1Size, n.l1Offset = u32(36), u64(40)
	n.tableOffset, n.tableBytes = u64(48), u32(56)<<n.clusterBits
	n.refcountBits = 16
	length := int64(72)
	if n.version >= 3 {
		n.incompatible, n.autoclear = uint64(u64(72)), uint64(u64(88))
		n.refcountBits, length = 1<<u32(96), u32(100)
		if length > 104 {
			n.compression = h[104]
		}
	}
	n.extL2 = n.incompatible&16 != 0
	for at := length; ; {
		e := n.read(at, 8)
		kind, size := binary.BigEndian.Uint32(e), int64(binary.BigEndian.Uint32(e[4:]))
		if kind == 0 || at > n.cluster {
			break
		}
		if kind == 0x23852875 {
			n.bitmaps = n.read(at+8, size)
		}
		at += 8 + (size+7)&^7
	}
	n.readSnapshots(u32(60), u64(64))
	return n, nil
}

// read gives bytes of the file; beyond its end are zeros.
func (n *naive) read(off, size int64) []byte { return window(n.file, off, size) }

func window(file []byte, off, size int64) []byte {
	b := make([]byte, size)
	if off >= 0 && off < int64(len(file)) {
		copy(b, file[off:])
	}
	return b
}

func (n *naive) word(off int64) uint64 {
	if off >= 0 && off+8 <= int64(len(n.file)) {
		return binary.BigEndian.Uint64(n.file[off:])
	}
	return binary.BigEndian.Uint64(n.read(off, 8))
}

func (n *naive) readSnapshots(count, offset int64) {
	at := offset
	for range count {
		h := n.read(at, 40)
		extra := int64(binary.BigEndian.Uint32(h[36:]))
		idBytes, nameBytes := int64(binary.BigEndian.Uint16(h[12:])), int64(binary.BigEndian.Uint16(h[14:]))
		s := naiveSnapshot{
			name:     string(n.read(at+40+extra+idBytes, nameBytes)),
			l1Offset: int64(binary.BigEndian.Uint64(h)), l1Size: int64(binary.BigEndian.Uint32(h[8:])), size: n.size,
		}
		if extra >= 16 {
			s.size = int64(n.word(at + 40 + 8))
		}
		n.snapshots = append(n.snapshots, s)
		at += (40 + extra + idBytes + nameBytes + 7) &^ 7
	}
	n.snapOffset, n.snapBytes = offset, at-offset
}

func (n *naive) entryBytes() int64 {
	if n.extL2 {
		return 16
	}
	return 8
}

const (
	offsetMask = 0x00fffffffffffe00
	copiedFlag = 1 << 63
	packedFlag = 1 << 62
)

// content reads the whole disk, or a snapshot of it.
func (n *naive) content(l1Offset, l1Size, size int64) ([]byte, error) {
	out := make([]byte, size)
	copy(out, n.backing)
	perTable := n.cluster / n.entryBytes()
	for at := int64(0); at < size; at += n.cluster {
		index := at >> n.clusterBits
		if index/perTable >= l1Size {
			return nil, fmt.Errorf("disk of %d bytes is larger than its table of %d entries", size, l1Size)
		}
		table := int64(n.word(l1Offset+8*(index/perTable)) & offsetMask)
		if table == 0 {
			continue
		}
		if err := n.readCluster(out[at:min(at+n.cluster, size)], table+index%perTable*n.entryBytes()); err != nil {
			return nil, fmt.Errorf("cluster at %d: %w", at, err)
		}
	}
	return out, nil
}

// readCluster reads what the entry at that offset of the file says.
func (n *naive) readCluster(out []byte, entryAt int64) error {
	entry := n.word(entryAt)
	if entry&packedFlag != 0 {
		return n.unpack(out, entry)
	}
	host := int64(entry & offsetMask)
	file := n.file
	allocated := host != 0
	if n.incompatible&4 != 0 {
		file, allocated = n.data, entry&copiedFlag != 0 || host != 0
	}
	if !n.extL2 {
		switch {
		case entry&1 != 0:
			clear(out)
		case allocated:
			copy(out, window(file, host, int64(len(out))))
		}
		return nil
	}
	bitmap := n.word(entryAt + 8)
	sub := n.cluster / 32
	for k := int64(0); k*sub < int64(len(out)); k++ {
		part := out[k*sub : min((k+1)*sub, int64(len(out)))]
		switch {
		case bitmap>>(32+k)&1 != 0:
			clear(part)
		case bitmap>>k&1 != 0:
			copy(part, window(file, host+k*sub, int64(len(part))))
		}
	}
	return nil
}

// packed is where the bytes of a compressed cluster are.
func (n *naive) packed(entry uint64) (offset, length int64) {
	x := 62 - (n.clusterBits - 8)
	offset = int64(entry & (1<<x - 1))
	sectors := int64(entry>>x) & (1<<(n.clusterBits-8) - 1)
	return offset, (sectors+1)*512 - offset%512
}

func (n *naive) unpack(out []byte, entry uint64) error {
	whole := make([]byte, n.cluster)
	if err := unpack(whole, n.read(n.packed(entry)), n.compression); err != nil {
		return err
	}
	copy(out, whole)
	return nil
}

// unpack unpacks one cluster. What follows its bytes does not matter.
func unpack(whole, packed []byte, kind byte) error {
	var from io.Reader = flate.NewReader(bytes.NewReader(packed))
	if kind == 1 {
		z, err := zstd.NewReader(bytes.NewReader(packed), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return err
		}
		defer z.Close()
		from = z
	}
	if _, err := io.ReadFull(from, whole); err != nil {
		return fmt.Errorf("unpack: %w", err)
	}
	return nil
}

// verdict is what is wrong with an image.
type verdict struct {
	errors []string // something used is counted too low, or points where it must not
	copied []string // a flag that says otherwise than the refcount whether a cluster is used once
	shared []string // a flag that says that a cluster is used once, which is used more often
	leaks  []string // something is counted too high
	ghosts []string // the same, behind the end of the file, where the peer does not look
}

func (v *verdict) String() string {
	var b strings.Builder
	for name, list := range map[string][]string{"error": v.errors, "copied": v.copied, "shared": v.shared, "leak": v.leaks, "behind the end": v.ghosts} {
		for _, x := range list[:min(len(list), 10)] {
			fmt.Fprintf(&b, "%s: %s\n", name, x)
		}
		if len(list) > 10 {
			fmt.Fprintf(&b, "%s: and %d more\n", name, len(list)-10)
		}
	}
	return b.String()
}

// census counts the uses of each cluster of the file.
type census struct {
	*naive
	v      verdict
	counts []uint32
	// names of users are gathered only when something is wrong.
	names map[int64][]string
}

// user is who uses a stretch of the file.
type user struct {
	what, of string
	i, j     int64
}

func (u user) String() string { return fmt.Sprintf("%s %s [%d][%d]", u.of, u.what, u.i, u.j) }

// check counts all references and compares with the refcounts.
func (n *naive) check() verdict {
	c := &census{naive: n}
	c.count()
	if len(c.v.errors)+len(c.v.copied)+len(c.v.leaks) > 0 {
		c = &census{naive: n, names: map[int64][]string{}}
		c.count()
	}
	return c.v
}

func (c *census) count() {
	c.use(0, c.cluster, user{what: "header"})
	c.use(c.tableOffset, c.tableBytes, user{what: "refcount table"})
	for at := int64(0); at < c.tableBytes; at += 8 {
		if block := int64(c.word(c.tableOffset+at) & offsetMask); block != 0 {
			c.use(block, c.cluster, user{what: "refcount block", i: at / 8})
		}
	}
	c.use(c.snapOffset, c.snapBytes, user{what: "snapshot table"})
	for _, s := range c.snapshots {
		c.table(s.l1Offset, s.l1Size, s.name)
	}
	c.table(c.l1Offset, c.l1Size, "disk")
	if c.autoclear&1 != 0 && c.bitmaps != nil {
		c.bitmapClusters()
	}
	c.flags()
	c.compare()
}

// use counts a stretch of the file.
func (c *census) use(off, size int64, who user) {
	if size == 0 {
		return
	}
	first, last := off>>c.clusterBits, (off+size-1)>>c.clusterBits
	if last > 2*int64(len(c.file))>>c.clusterBits+64 {
		c.v.errors = append(c.v.errors, fmt.Sprintf("%d bytes at %#x are far behind the end of the file, used by %s", size, off, who))
		return
	}
	for more := last + 1 - int64(len(c.counts)); more > 0; more-- {
		c.counts = append(c.counts, 0)
	}
	for at := first; at <= last; at++ {
		c.counts[at]++
		if c.names != nil {
			c.names[at] = append(c.names[at], who.String())
		}
	}
}

func (c *census) aligned(off int64, who user) bool {
	if off&(c.cluster-1) != 0 {
		c.v.errors = append(c.v.errors, fmt.Sprintf("%s at %#x is not aligned", who, off))
		return false
	}
	return true
}

// table counts an L1 table and all below it.
func (c *census) table(l1Offset, l1Size int64, of string) {
	c.use(l1Offset, l1Size*8, user{what: "L1", of: of})
	for i := range l1Size {
		table := int64(c.word(l1Offset+8*i) & offsetMask)
		who := user{what: "L2", of: of, i: i}
		if c.word(l1Offset+8*i) != 0 && table == 0 {
			c.v.errors = append(c.v.errors, fmt.Sprintf("%s is a flag without an offset", who))
		}
		if table == 0 || !c.aligned(table, who) {
			continue
		}
		c.use(table, c.cluster, who)
		who.what = "data"
		for who.j = 0; who.j < c.cluster/c.entryBytes(); who.j++ {
			at := table + who.j*c.entryBytes()
			if entry := c.word(at); entry != 0 {
				c.entry(entry, who)
			}
			if c.extL2 {
				c.bitmap(c.word(at), c.word(at+8), who)
			}
		}
	}
}

func (c *census) entry(entry uint64, who user) {
	if entry&packedFlag != 0 {
		off, n := c.packed(entry)
		who.what = "packed"
		c.use(off, n, who)
		return
	}
	host := int64(entry & offsetMask)
	if host != 0 && c.incompatible&4 == 0 && c.aligned(host, who) {
		c.use(host, c.cluster, who)
	}
}

// bitmap looks at which parts of a cluster are said to be there.
func (c *census) bitmap(entry, bitmap uint64, who user) {
	there, zero := uint32(bitmap), uint32(bitmap>>32)
	packed, host := entry&packedFlag != 0, entry&offsetMask != 0 || c.incompatible&4 != 0 && entry&copiedFlag != 0
	if there&zero != 0 || packed && bitmap != 0 || !packed && !host && there != 0 {
		c.v.errors = append(c.v.errors, fmt.Sprintf("%s is %#x with parts %#x", who, entry, bitmap))
	}
}

// bitmapClusters counts the directory, the tables and the data of bitmaps.
func (c *census) bitmapClusters() {
	size, at := int64(binary.BigEndian.Uint64(c.bitmaps[8:])), int64(binary.BigEndian.Uint64(c.bitmaps[16:]))
	c.use(at, size, user{what: "bitmap directory"})
	for end := at + size; at < end; {
		e := c.read(at, 24)
		table, entries := int64(binary.BigEndian.Uint64(e)), int64(binary.BigEndian.Uint32(e[8:]))
		c.use(table, entries*8, user{what: "bitmap table"})
		for i := range entries {
			if data := int64(c.word(table+8*i) & offsetMask); data != 0 {
				c.use(data, c.cluster, user{what: "bitmap", i: i})
			}
		}
		at += (24 + int64(binary.BigEndian.Uint16(e[18:])) + int64(binary.BigEndian.Uint32(e[20:])) + 7) &^ 7
	}
}

func (n *naive) refcount(cluster int64) uint64 {
	perBlock := n.cluster * 8 / n.refcountBits
	if cluster/perBlock*8 >= n.tableBytes {
		return 0
	}
	block := int64(n.word(n.tableOffset+cluster/perBlock*8) & offsetMask)
	if block == 0 {
		return 0
	}
	bit := cluster % perBlock * n.refcountBits
	var few [8]byte
	if at := block + bit/8; at < int64(len(n.file)) {
		copy(few[:], n.file[at:])
	}
	b := few[:]
	switch n.refcountBits {
	case 64:
		return binary.BigEndian.Uint64(b)
	case 32:
		return uint64(binary.BigEndian.Uint32(b))
	case 16:
		return uint64(binary.BigEndian.Uint16(b))
	}
	return uint64(b[0]) >> (bit % 8) & (1<<n.refcountBits - 1)
}

// flags compares the flag of each entry of the disk, not of snapshots, with the refcount.
func (c *census) flags() {
	judge := func(entry uint64, host int64, who user) {
		at := host >> c.clusterBits
		if count := c.refcount(at); (count == 1) != (entry&copiedFlag != 0) {
			c.v.copied = append(c.v.copied, fmt.Sprintf("%s is %#x, refcount %d", who, entry, count))
		}
		if entry&copiedFlag != 0 && at < int64(len(c.counts)) && c.counts[at] > 1 {
			c.v.shared = append(c.v.shared, fmt.Sprintf("%s is %#x, used %d times", who, entry, c.counts[at]))
		}
	}
	for i := range c.l1Size {
		l1 := c.word(c.l1Offset + 8*i)
		table := int64(l1 & offsetMask)
		if table == 0 || table&(c.cluster-1) != 0 {
			continue
		}
		judge(l1, table, user{what: "L1", i: i})
		for j := range c.cluster / c.entryBytes() {
			entry := c.word(table + j*c.entryBytes())
			host := int64(entry & offsetMask)
			who := user{what: "L2", i: i, j: j}
			switch {
			case entry&packedFlag != 0:
				if entry&copiedFlag != 0 {
					c.v.copied = append(c.v.copied, fmt.Sprintf("%s is %#x, compressed", who, entry))
				}
			case host == 0:
			case c.incompatible&4 == 0:
				judge(entry, host, who)
			case entry&copiedFlag == 0: // a data file has no refcounts: each cluster is used once
				c.v.copied = append(c.v.copied, fmt.Sprintf("%s is %#x, in a data file", who, entry))
			}
		}
	}
}

// compare holds the uses against the refcounts, also of clusters that nobody uses.
func (c *census) compare() {
	last := max(int64(len(c.file)-1)>>c.clusterBits+1, int64(len(c.counts)))
	perBlock := c.cluster * 8 / c.refcountBits
	for i := range c.tableBytes / 8 {
		if c.word(c.tableOffset+8*i)&offsetMask != 0 {
			last = max(last, (i+1)*perBlock)
		}
	}
	for at := range last {
		uses, count := uint64(0), c.refcount(at)
		if at < int64(len(c.counts)) {
			uses = uint64(c.counts[at])
		}
		switch {
		case uses > count:
			c.v.errors = append(c.v.errors, fmt.Sprintf("cluster %d has refcount %d, used %d times by %v", at, count, uses, c.names[at]))
		case uses < count && at<<c.clusterBits >= int64(len(c.file)):
			c.v.ghosts = append(c.v.ghosts, fmt.Sprintf("cluster %d has refcount %d", at, count))
		case uses < count:
			c.v.leaks = append(c.v.leaks, fmt.Sprintf("cluster %d has refcount %d, used %d times by %v", at, count, uses, c.names[at]))
		}
		if at<<c.clusterBits >= int64(len(c.file))+c.cluster && uses > 0 {
			c.v.errors = append(c.v.errors, fmt.Sprintf("cluster %d is behind the end of the file, used by %v", at, c.names[at]))
		}
	}
}
