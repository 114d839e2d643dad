// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"fmt"
	"math/bits"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// Allocation is room for one write, from BeginWrite or BeginCompressed to Link or Abort. It is the caller's, is used again
// as often as he likes, and must not be copied or touched while it is in use. While it is, its guest clusters are its
// own: other writers of them, and Zero and Discard, wait. So who has one in use links or aborts it before he asks for
// another, or calls any other method that may wait.
type Allocation struct {
	// Offset and Length are the guest bytes that this is for: what was asked for, or the first part of it. They lie in
	// clusters that are contiguous on the host.
	Offset, Length int64
	// Host is where the byte at Offset goes, in the image or in the external data file.
	Host int64
	// InPlace says that nothing was allocated: the caller writes to Host, and Link and Abort do nothing.
	InPlace bool
	// Head and Tail are how many bytes before Offset and behind Offset+Length the caller must fill too, at Host-Head and
	// Host+Length: with what a read of the guest gives there now. Until Link such a read finds the old data. Bytes at or
	// behind the end of the disk are filled with zeros.
	Head, Tail int64
	// Fresh says that the host clusters have never been written and lie behind what the file held: they read as zeros, so
	// filling with zeros may be left out.
	Fresh bool

	first, last int64 // guest clusters
	slice       *page // with their entries; pinned
	taken       run   // host clusters that were allocated; n is 0 where those of the old entries are used
	compressed  int   // bytes; 0 for an ordinary write
	next, prev  *Allocation
	listed      bool
}

// list puts a among those in flight.
func (m *Image) list(a *Allocation) {
	a.listed, a.prev, a.next = true, nil, m.inflight
	if m.inflight != nil {
		m.inflight.prev = a
	}
	m.inflight = a
}

func (m *Image) unlist(a *Allocation) {
	if a.prev != nil {
		a.prev.next = a.next
	} else {
		m.inflight = a.next
	}
	if a.next != nil {
		a.next.prev = a.prev
	}
	a.listed, a.next, a.prev = false, nil, nil
}

// heldFrom is the first cluster from first to last that is held by an allocation; false where none is.
func (m *Image) heldFrom(first, last int64) (int64, bool) {
	at, held := last, false
	for a := m.inflight; a != nil; a = a.next {
		if a.first <= at && a.last >= first {
			at, held = max(first, a.first), true
		}
	}
	return at, held
}

// awaitCluster suspends the caller until nobody holds the cluster.
func (m *Image) awaitCluster(c int64) error {
	return m.wait(func() bool { _, held := m.heldFrom(c, c); return !held })
}

// BeginWrite finds room for a prefix of [off, off+n) and fills in a. It waits while another allocation holds the first
// cluster, and it may commit where the caches are full of changes.
func (m *Image) BeginWrite(a *Allocation, off, n int64) error {
	if err := m.enter(); err != nil {
		return err
	}
	defer m.leave()
	*a = Allocation{Offset: off, Length: n, first: off >> m.g.ClusterBits}
	if err := m.prepare(); err != nil {
		return err
	}
	if err := m.relieve(); err != nil {
		return err
	}
	for {
		p, err := m.ownSlice(a.first)
		if err != nil {
			return err
		}
		if _, held := m.heldFrom(a.first, a.first); !held {
			a.slice = p
			return m.begin(a)
		}
		if err := m.awaitCluster(a.first); err != nil {
			return err
		}
	}
}

// begin decides what to do about the clusters of a, whose slice was just looked up.
func (m *Image) begin(a *Allocation) error {
	a.Length = min(a.Length, m.sliceMask()+1-a.Offset&m.sliceMask())
	if x, state := m.run(a.slice.buf, a.Offset, a.Length); state == found && x.Kind == Data && x.InPlace {
		a.Length, a.Host, a.InPlace = x.Length, x.Host, true
		return nil
	}
	e := m.g.Entry(a.slice.buf, m.sliceIndex(a.first))
	if err := m.checkEntry(a.first, e); err != nil {
		return err
	}
	reuse := m.reusable(a.first, e)
	a.last = m.alike(a, e, reuse)
	a.slice.pins++
	m.list(a)
	var err error
	if !reuse {
		err = m.takeClusters(a)
	}
	if err != nil {
		m.end(a)
		return err
	}
	m.measure(a, e, reuse)
	return nil
}

// checkEntry refuses an entry that must not be used: one that breaks the rules, or whose host cluster, which is the guest's
// alone, is a table's.
func (m *Image) checkEntry(cluster int64, e qcow2.L2Entry) error {
	if m.g.Kind(e) == qcow2.Invalid || m.g.DataFile && m.misplaced(cluster, e) {
		return m.badEntry(cluster, e)
	}
	if !e.IsCompressed() && !m.g.DataFile && m.g.HasHost(e) && m.claims.claimed(e.Offset()>>m.g.ClusterBits) {
		return m.damage(e.Offset(), "guest offset %#x leads to a table", cluster<<m.g.ClusterBits)
	}
	return nil
}

// reusable tells whether the host cluster of an entry may take what is written: it has one that nobody shares. In an
// external data file each cluster has its place.
func (m *Image) reusable(cluster int64, e qcow2.L2Entry) bool {
	if m.g.DataFile {
		return true
	}
	return !e.IsCompressed() && e.Offset() != 0 && e.Copied()
}

// hostOf is where a cluster that is reused lies.
func (m *Image) hostOf(cluster int64, e qcow2.L2Entry) int64 {
	if m.g.DataFile {
		return cluster << m.g.ClusterBits
	}
	return e.Offset()
}

// alike is the last cluster up to which all clusters of a are like the first, whose entry is e: to be allocated, or
// contiguous ones to be reused. It ends with the slice, with the write, and before a cluster that somebody holds or that can
// be written in place.
func (m *Image) alike(a *Allocation, e qcow2.L2Entry, reuse bool) int64 {
	last := min((a.Offset+a.Length-1)>>m.g.ClusterBits, a.first|(1<<m.sliceBits-1))
	if at, held := m.heldFrom(a.first, last); held {
		last = at - 1
	}
	host := m.hostOf(a.first, e)
	for c := a.first + 1; c <= last; c++ {
		host += m.g.ClusterSize
		e := m.g.Entry(a.slice.buf, m.sliceIndex(c))
		bad := m.g.Kind(e) == qcow2.Invalid || m.g.DataFile && m.misplaced(c, e)
		if bad || m.reusable(c, e) != reuse || reuse && (m.hostOf(c, e) != host || m.g.Kind(e) == Data) ||
			!m.g.DataFile && m.g.HasHost(e) && !e.IsCompressed() && m.claims.claimed(e.Offset()>>m.g.ClusterBits) {
			return c - 1
		}
	}
	return last
}

// takeClusters allocates host clusters for a, or for the first of its guest clusters.
func (m *Image) takeClusters(a *Allocation) error {
	if m.h.IsLazy() {
		if err := m.mark(); err != nil {
			return err
		}
	}
	water := m.highWater
	start, got, err := m.allocate(a.last - a.first + 1)
	if err != nil {
		return err
	}
	a.taken = run{start, got}
	a.last = a.first + got - 1
	a.Fresh = start >= water
	return nil
}

// measure fills in what the caller is to write.
func (m *Image) measure(a *Allocation, e qcow2.L2Entry, reuse bool) {
	host := a.taken.first << m.g.ClusterBits
	if reuse {
		host = m.hostOf(a.first, e)
	}
	in := a.Offset & (m.g.ClusterSize - 1)
	a.Host = host + in
	end := (a.last + 1) << m.g.ClusterBits
	a.Length = min(a.Length, end-a.Offset)
	head, _ := m.fill(e, reuse, in, in+1)
	a.Head = in - head
	if stop := a.Offset + a.Length; stop < end {
		lastEntry := m.g.Entry(a.slice.buf, m.sliceIndex(a.last))
		from := stop - a.last<<m.g.ClusterBits
		_, tail := m.fill(lastEntry, reuse, from-1, from)
		a.Tail = tail - from
	}
}

// fill tells from where to where a cluster must be filled for a write of its bytes from up to to: whole, or with
// subclusters from the first to the last that is written or, when the cluster moves, that has data.
func (m *Image) fill(e qcow2.L2Entry, reuse bool, from, to int64) (int64, int64) {
	if !m.g.Extended || e.IsCompressed() {
		return 0, m.g.ClusterSize
	}
	unit := int64(1) << m.g.SubclusterBits
	start, end := from&^(unit-1), (to+unit-1)&^(unit-1)
	switch data := uint32(e.Bitmap); {
	case data == 0:
	case !reuse:
		start = min(start, int64(bits.TrailingZeros32(data))*unit)
		end = max(end, int64(32-bits.LeadingZeros32(data))*unit)
	case data>>((to-1)>>m.g.SubclusterBits)&1 != 0:
		end = to // others may be writing to the rest of this subcluster where it is
	}
	return start, end
}

// Link makes the tables say what was written. All transfers of a have ended without an error. What was there before is
// let go with the next Commit. Does not wait, cannot fail.
func (m *Image) Link(a *Allocation) {
	if !a.listed {
		return
	}
	m.l2.change(a.slice)
	for c := a.first; c <= a.last; c++ {
		i := m.sliceIndex(c)
		old := m.g.Entry(a.slice.buf, i)
		m.g.PutEntry(a.slice.buf, i, m.linked(a, c, old))
		if a.taken.n > 0 {
			m.letGoEntry(old)
		}
	}
	m.end(a)
}

// linked is the entry of cluster c of a, which was old.
func (m *Image) linked(a *Allocation, c int64, old qcow2.L2Entry) qcow2.L2Entry {
	if a.compressed > 0 {
		e, _ := m.g.CompressedEntry(a.Host, a.compressed)
		return e
	}
	host := m.hostOf(c, old)
	if a.taken.n > 0 {
		host = (a.taken.first + c - a.first) << m.g.ClusterBits
	}
	e := m.g.DataEntry(host, true)
	if !m.g.Extended || old.IsCompressed() {
		return e
	}
	base := c << m.g.ClusterBits
	from := max(0, a.Offset-a.Head-base)
	to := min(m.g.ClusterSize, a.Offset+a.Length+a.Tail-base)
	first := int(from >> m.g.SubclusterBits)
	mask := qcow2.SubclusterMask(first, int(to>>m.g.SubclusterBits)-first)
	e.Bitmap = (old.Bitmap | mask) &^ (mask << 32)
	return e
}

// Abort gives back what a holds; the guest sees the old data. All transfers of a have ended. Does not wait.
func (m *Image) Abort(a *Allocation) {
	if !a.listed {
		return
	}
	if a.taken.n > 0 {
		m.giveBack(a.taken.first, a.taken.n)
	}
	m.end(a)
}

func (m *Image) end(a *Allocation) {
	m.unlist(a)
	a.slice.pins--
	a.slice = nil
}

// letGoEntry lets go of the host clusters of an entry that was replaced.
func (m *Image) letGoEntry(e qcow2.L2Entry) {
	if r := m.hostClusters(e); r.n > 0 {
		m.letGo(r.first, r.n)
	}
}

// hostClusters are the clusters of the image that an entry uses once each.
func (m *Image) hostClusters(e qcow2.L2Entry) run {
	switch {
	case m.g.DataFile:
	case e.IsCompressed():
		off, n, _ := m.g.Compressed(e)
		return m.span(off, int64(n))
	case e.Offset() != 0:
		return run{e.Offset() >> m.g.ClusterBits, 1}
	}
	return run{}
}

// span are the clusters that n bytes at off touch.
func (m *Image) span(off, n int64) run {
	first := off >> m.g.ClusterBits
	return run{first, (off+n-1)>>m.g.ClusterBits - first + 1}
}

// BeginCompressed finds room for n compressed bytes that hold the whole cluster at off (off aligned; n less than a
// cluster; the disk's last cluster is compressed whole, its end filled with zeros). They go to a.Host. Link then puts
// them in the place of whatever the cluster was.
func (m *Image) BeginCompressed(a *Allocation, off int64, n int) error {
	if m.g.DataFile || n <= 0 || int64(n) >= m.g.ClusterSize || !m.g.Aligned(off) {
		return fmt.Errorf("write a compressed cluster of %d bytes at %#x: %w", n, off, syscall.EINVAL)
	}
	if err := m.enter(); err != nil {
		return err
	}
	defer m.leave()
	first := off >> m.g.ClusterBits
	*a = Allocation{Offset: off, Length: m.g.ClusterSize, compressed: n, first: first, last: first}
	if err := m.prepare(); err != nil {
		return err
	}
	if err := m.relieve(); err != nil {
		return err
	}
	for {
		p, err := m.ownSlice(first)
		if err != nil {
			return err
		}
		if _, held := m.heldFrom(first, first); !held {
			a.slice = p
			return m.beginCompressed(a)
		}
		if err := m.awaitCluster(first); err != nil {
			return err
		}
	}
}

func (m *Image) beginCompressed(a *Allocation) error {
	if err := m.checkEntry(a.first, m.g.Entry(a.slice.buf, m.sliceIndex(a.first))); err != nil {
		return err
	}
	a.slice.pins++
	m.list(a)
	err := m.takeBytes(a)
	if err != nil {
		m.end(a)
	}
	return err
}

func (m *Image) takeBytes(a *Allocation) error {
	if m.h.IsLazy() {
		if err := m.mark(); err != nil {
			return err
		}
	}
	host, err := m.pack(int64(a.compressed))
	if err != nil {
		return err
	}
	a.Host = host
	a.taken = m.span(host, int64(a.compressed))
	if _, ok := m.g.CompressedEntry(host, a.compressed); !ok {
		m.giveBack(a.taken.first, a.taken.n)
		return fmt.Errorf("write a compressed cluster at %#x: it lies too far back in the image: %w", host, syscall.EFBIG)
	}
	return nil
}

// pack finds room for n bytes, less than a cluster: behind those of the compressed cluster before, reaching into the next
// host cluster where that is free, or else in a new host cluster. Each host cluster is counted once for each compressed
// cluster that it has a part of.
func (m *Image) pack(n int64) (int64, error) {
	for m.packed != 0 {
		at := m.packed
		ok, err := m.packAt(at, n)
		if err != nil {
			return 0, err
		}
		if ok {
			m.setPacked(at + n)
			return at, nil
		}
		if m.packed == at {
			m.packed = 0
		}
	}
	c, _, err := m.allocate(1)
	if err != nil {
		return 0, err
	}
	host := c << m.g.ClusterBits
	m.setPacked(host + n)
	return host, nil
}

func (m *Image) setPacked(at int64) {
	m.packed = at
	if m.g.Aligned(at) {
		m.packed = 0
	}
}

// packAt counts the clusters of n bytes at the place of the last compressed cluster's end. It is false where they do not
// fit there, or where others changed the place while it waited.
func (m *Image) packAt(at, n int64) (bool, error) {
	r := m.span(at, n)
	p, err := m.block(m.blockOf(r.first), false)
	if err != nil || p == nil {
		return false, err
	}
	second := p
	if r.n == 2 && m.blockOf(r.first+1) != m.blockOf(r.first) {
		p.pins++
		second, err = m.block(m.blockOf(r.first+1), true)
		p.pins--
		if err != nil {
			return false, err
		}
	}
	count := m.count(p, m.indexOf(r.first))
	if m.packed != at || count == 0 || count >= m.g.MaxRefcount() {
		return false, nil
	}
	if r.n == 2 {
		i := m.indexOf(r.first + 1)
		if m.count(second, i) != 0 || m.usable(r.first+1, 1) != nil {
			return false, nil
		}
		m.use(second, i, r.first+1, 1)
	}
	m.setCount(p, m.indexOf(r.first), count+1)
	return true, nil
}
