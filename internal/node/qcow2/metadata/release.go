// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"cmp"
	"slices"
)

// releases are host clusters on their way from in use to free. Each use that a table gave up passes through
//
//	unlinked   the tables in memory do not name it any more
//	committed  nor do those on disk
//	waiting    only requests that began before may still have a transfer there
//
// and is then discarded in the file and counted down. Until that last step the cluster counts as in use.
type releases struct {
	unlinked  []run
	committed []run
	waiting   []run
	pending   int64 // clusters in all three, and in the commit that runs
	reaping   bool

	unlinkedClusters int64

	// Requests are counted in two generations. A change of generation begins when nobody is left of the one before the last, so that
	// inside[old] == 0 means that all who entered before the change have left.
	generation uint8
	inside     [2]int
}

// run is one use of each of n host clusters from first on.
type run struct{ first, n int64 }

// Enter begins a request: see the package comment. Does not wait, and takes no memory.
func (m *Image) Enter() Ticket {
	m.inside[m.generation]++
	return Ticket(m.generation)
}

// Exit ends what Enter began. Does not wait.
func (m *Image) Exit(t Ticket) { m.inside[t]-- }

// letGo notes that a table in memory gave up one use of each of n clusters.
func (m *Image) letGo(first, n int64) {
	m.unlinked = appendRun(m.unlinked, run{first, n})
	m.unlinkedClusters += n
	m.pending += n
}

// giveBack notes that clusters are not needed that no table ever named.
func (m *Image) giveBack(first, n int64) {
	m.committed = appendRun(m.committed, run{first, n})
	m.pending += n
}

func appendRun(list []run, r run) []run {
	if n := len(list); n > 0 && list[n-1].first+list[n-1].n == r.first {
		list[n-1].n += r.n
		return list
	}
	return append(list, r)
}

// reap frees what nobody can have a transfer in any more. Errors leave clusters counted that nobody uses: leaks.
func (m *Image) reap() {
	if m.reaping || m.broken != nil {
		return
	}
	m.reaping = true
	for m.ripe() {
		list := m.waiting
		m.waiting = nil
		slices.SortFunc(list, func(a, b run) int { return cmp.Compare(a.first, b.first) })
		for _, r := range list {
			m.release(r)
		}
	}
	m.reaping = false
}

// ripe moves on what can be, and tells whether there is something to free.
func (m *Image) ripe() bool {
	old := 1 - m.generation
	if len(m.waiting) == 0 && len(m.committed) > 0 && m.inside[old] == 0 {
		m.waiting, m.committed = m.committed, nil
		m.generation, old = old, m.generation
	}
	return len(m.waiting) > 0 && m.inside[old] == 0
}

// release gives up one use of each cluster of a run.
func (m *Image) release(r run) {
	m.pending -= r.n
	for r.n > 0 && m.broken == nil {
		p, err := m.block(m.blockOf(r.first), false)
		if err != nil {
			return
		}
		n := min(r.n, m.perBlock()-int64(m.indexOf(r.first)))
		if p == nil {
			_ = m.damage(r.first<<m.g.ClusterBits, "cluster was in use, but counted as free")
			return
		}
		for done := int64(0); done < n && m.broken == nil; {
			done += m.releaseAlike(p, r.first+done, n-done)
		}
		r.first, r.n = r.first+n, r.n-n
	}
}

// releaseAlike gives up one use of those first clusters of n, all counted by p, that become free by it, or of those that do not, and
// tells how many these are.
func (m *Image) releaseAlike(p *page, first, n int64) int64 {
	i := m.indexOf(first)
	last := m.count(p, i) == 1
	k := int64(1)
	for k < n && (m.count(p, i+int(k)) == 1) == last {
		k++
	}
	if last {
		m.discardCluster(p, first, k)
	}
	for j := range int(k) {
		count := m.count(p, i+j)
		if count == 0 {
			_ = m.damage((first+int64(j))<<m.g.ClusterBits, "cluster was in use, but counted as free")
			return k
		}
		m.setCount(p, i+j, count-1)
	}
	if last {
		m.freed += uint64(k)
		m.free = min(m.free, first)
	}
	return k
}

// discardCluster gives the space of clusters back before they may be used again. Their block stays in memory meanwhile,
// and nobody packs another compressed cluster into them.
func (m *Image) discardCluster(p *page, first, n int64) {
	if c := m.packed >> m.g.ClusterBits; m.packed != 0 && c >= first && c < first+n {
		m.packed = 0
	}
	if m.o.NoDiscard {
		return
	}
	p.pins++
	_ = m.s.Discard(first<<m.g.ClusterBits, n<<m.g.ClusterBits) // a file that cannot give space back keeps it
	p.pins--
}
