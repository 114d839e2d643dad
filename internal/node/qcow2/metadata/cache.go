// SPDX-License-Identifier: Apache-2.0

package metadata

// page is a piece of a table in memory: a slice of an L2 table, or a refcount block.
//
// Its bytes are as they are on disk. What a running commit writes are the bytes as they were when it began: frozen is
// the same memory as buf until somebody changes the page, who then takes new memory for buf.
type page struct {
	key     int64
	buf     []byte
	frozen  []byte // nil when no commit has it
	dirty   bool   // buf has what neither the disk nor frozen has
	loading bool   // is being read, or made: nobody else may look at buf
	pins    int    // stays, whatever happens
	used    bool   // since the hand of the clock passed
	next    *page  // in the hash chain
}

// cache is a bounded set of pages. Pages that are pinned, dirty, frozen or loading stay; where no other is left it grows
// beyond its bound, and shrinks again with the pages that are evicted later.
type cache struct {
	size    int // bytes of a page
	limit   int // pages
	pages   []*page
	buckets []*page
	hand    int
	dirty   int
	soiled  []*page  // has every dirty page, and some that are not any more
	spare   [][]byte // memory of pages

	hits, misses uint64
}

// maxSpare bounds the memory that is kept for reuse.
const maxSpare = 16

func newCache(pageSize int, limit int64) *cache {
	n := 16
	for int64(n) < limit && n < 1<<20 {
		n *= 2
	}
	return &cache{size: pageSize, limit: int(limit), buckets: make([]*page, n)}
}

func (c *cache) bucket(key int64) **page { return &c.buckets[key&int64(len(c.buckets)-1)] }

// get finds a page, loading ones too.
func (c *cache) get(key int64) *page {
	p := *c.bucket(key)
	for p != nil && p.key != key {
		p = p.next
	}
	return p
}

// take makes a page for a key that has none, in the state of loading. Its bytes are anything.
func (c *cache) take(key int64) *page {
	p := c.victim()
	if p == nil {
		p = &page{buf: c.memory()}
		c.pages = append(c.pages, p)
	}
	p.key, p.loading, p.used = key, true, true
	b := c.bucket(key)
	p.next, *b = *b, p
	return p
}

// victim unhooks a page that may be used for something else; nil when there is room for a new one, or none is free.
func (c *cache) victim() *page {
	if len(c.pages) < c.limit {
		return nil
	}
	for range 2 * len(c.pages) {
		c.hand = (c.hand + 1) % len(c.pages)
		p := c.pages[c.hand]
		switch {
		case p.pins > 0 || p.dirty || p.loading || p.frozen != nil:
		case p.used:
			p.used = false
		case len(c.pages) > c.limit:
			c.unhook(p)
			last := len(c.pages) - 1
			c.pages[c.hand], c.pages[last] = c.pages[last], nil
			c.pages = c.pages[:last]
			c.hand = 0
		default:
			c.unhook(p)
			return p
		}
	}
	return nil
}

// unhook takes a page out of its chain; it stays in pages.
func (c *cache) unhook(p *page) {
	at := c.bucket(p.key)
	for *at != nil && *at != p {
		at = &(*at).next
	}
	if *at == p {
		*at = p.next
	}
	p.key, p.next = -1, nil
}

// drop forgets a page that could not be read or made.
func (c *cache) drop(p *page) {
	c.unhook(p)
	p.loading, p.used = false, false
	c.clean(p)
}

// reset forgets all pages. None is pinned, loading or frozen.
func (c *cache) reset() {
	clear(c.buckets)
	clear(c.pages)
	c.pages, c.soiled, c.dirty, c.hand = c.pages[:0], nil, 0, 0
}

func (c *cache) clean(p *page) {
	if p.dirty {
		p.dirty = false
		c.dirty--
	}
}

// change is called before the bytes of a page are changed.
func (c *cache) change(p *page) {
	if p.frozen != nil && &p.frozen[0] == &p.buf[0] {
		p.buf = c.memory()
		copy(p.buf, p.frozen)
	}
	c.soil(p)
}

func (c *cache) soil(p *page) {
	if !p.dirty {
		p.dirty = true
		c.dirty++
		c.soiled = append(c.soiled, p)
	}
	p.used = true
}

// freeze hands all dirty pages to a commit.
func (c *cache) freeze(to func(p *page)) {
	for _, p := range c.soiled {
		if p.dirty {
			p.frozen = p.buf
			c.clean(p)
			to(p)
		}
	}
	clear(c.soiled)
	c.soiled = c.soiled[:0]
}

// thaw takes it back; a commit that failed leaves it dirty.
func (c *cache) thaw(p *page, durable bool) {
	if &p.frozen[0] != &p.buf[0] && len(c.spare) < maxSpare {
		c.spare = append(c.spare, p.frozen)
	}
	p.frozen = nil
	if !durable {
		c.soil(p)
	}
}

func (c *cache) memory() []byte {
	if n := len(c.spare); n > 0 {
		b := c.spare[n-1]
		c.spare = c.spare[:n-1]
		return b
	}
	return make([]byte, c.size)
}

// crowded tells whether so much is dirty that a commit should make room.
func (c *cache) crowded() bool { return c.dirty > c.limit/2 }
