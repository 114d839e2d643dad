// SPDX-License-Identifier: Apache-2.0

package block

import "fmt"

// CacheMode says what stands between a completed write and the medium. The names are the ones that people know from
// QEMU.
type CacheMode uint8

const (
	// CacheDefault is CacheNone where the file allows it, else CacheWriteback.
	CacheDefault CacheMode = iota
	// CacheNone passes the host's page cache by (O_DIRECT). The medium's own cache remains: a flush empties it.
	CacheNone
	// CacheWriteback goes through the host's page cache. A flush makes durable what was written.
	CacheWriteback
	// CacheWritethrough goes through the host's page cache, and each write is durable when it completes.
	CacheWritethrough
	// CacheUnsafe goes through the host's page cache and ignores flushes: a crash of the host may lose anything.
	CacheUnsafe
)

var cacheNames = [...]string{"default", "none", "writeback", "writethrough", "unsafe"}

// String is the mode's name as the command line knows it.
func (m CacheMode) String() string {
	if int(m) < len(cacheNames) {
		return cacheNames[m]
	}
	return fmt.Sprintf("cache(%d)", uint8(m))
}

// ParseCacheMode is the inverse of String. An empty text is the default.
func ParseCacheMode(s string) (CacheMode, error) {
	if s == "" {
		return CacheDefault, nil
	}
	for i, n := range cacheNames {
		if n == s {
			return CacheMode(i), nil
		}
	}
	return 0, fmt.Errorf("unknown cache mode %q (want none, writeback, writethrough or unsafe)", s)
}
