// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/sys"
)

// traits are what the choice of an engine depends on.
type traits struct {
	regular  bool
	block    bool
	direct   bool
	inMemory bool // tmpfs, ramfs, hugetlbfs
	noWait   bool // the file can tell that a request would block
}

// askFile finds out about fd without doing I/O on it.
func askFile(fd int, direct bool) (traits, error) {
	mode, err := sys.FileMode(fd)
	if err != nil {
		return traits{}, fmt.Errorf("fstat: %w", err)
	}
	flags, err := sys.FileFlags(fd)
	if err != nil {
		return traits{}, fmt.Errorf("read descriptor flags: %w", err)
	}
	t := traits{
		regular: mode&syscall.S_IFMT == syscall.S_IFREG,
		block:   mode&syscall.S_IFMT == syscall.S_IFBLK,
		direct:  direct || flags&syscall.O_DIRECT != 0,
	}
	if magic, err := sys.StatfsType(fd); err == nil && t.regular {
		t.inMemory = magic == sys.TMPFS_MAGIC || magic == sys.RAMFS_MAGIC || magic == sys.HUGETLBFS_MAGIC
	}
	if t.regular || t.block {
		t.noWait = knowsNoWait(fd)
	}
	return t, nil
}

// farAway is an offset that lies beyond the end of every file, and on every block boundary.
const farAway = 1 << 62

// knowsNoWait asks for bytes that no file has, so that the answer comes from the check of the flag and never from a disk.
func knowsNoWait(fd int) bool {
	var buf [2 * sectorGrid]byte
	one := [1]IOVec{IOVecOf(buf[:sectorGrid])}
	_, err := sys.Preadv2(fd, one[:], farAway, sys.RWF_NOWAIT)
	return !errors.Is(err, syscall.EOPNOTSUPP)
}

// preference is one engine that may serve a file, and the reason to take it before the ones that follow.
type preference struct {
	kind   EngineKind
	reason string
}

// prefer lists the engines for a file, best first. The last one is always the threads, which can be had everywhere.
func prefer(t traits, uring bool) []preference {
	threads := preference{EngineThreads, "it blocks on nobody's loop"}
	switch {
	case !t.regular && !t.block:
		return []preference{{EngineThreads, "neither a regular file nor a block device"}}
	case !t.noWait && t.inMemory:
		return []preference{{EngineLinuxAIO, "file system in memory answers EOPNOTSUPP to RWF_NOWAIT, io_uring would punt every request to a kernel worker"}, threads}
	case !t.noWait && t.direct:
		return []preference{{EngineLinuxAIO, "file answers EOPNOTSUPP to RWF_NOWAIT, io_uring would punt every request to a kernel worker"}, threads}
	case !t.noWait:
		return []preference{{EngineThreads, "buffered file answers EOPNOTSUPP to RWF_NOWAIT, io_uring would punt every request to a kernel worker and io_submit would block the loop"}}
	case t.direct && uring:
		return []preference{{EngineIOUring, "direct file, and io_uring is the loop's poller"}, {EngineLinuxAIO, "direct file"}, threads}
	case t.direct:
		return []preference{{EngineLinuxAIO, "direct file, and io_uring is not the loop's poller"}, threads}
	case uring:
		return []preference{{EngineIOUring, "buffered file that io_uring serves without blocking, and io_uring is the loop's poller"}, threads}
	}
	return []preference{{EngineThreads, "buffered file, io_uring is not the loop's poller and io_submit would block the loop"}}
}

// chooseEngine finds the engine for f and attaches f to it.
func (f *File) chooseEngine(kind EngineKind, t traits) error {
	if kind != EngineAuto {
		if err := f.attachTo(kind); err != nil {
			return err
		}
		f.reason = askedFor(kind, t)
		return nil
	}
	lost := ""
	for _, p := range prefer(t, f.loop.ring != nil) {
		err := f.attachTo(p.kind)
		if err == nil {
			f.reason = fmt.Sprintf("%s: %s%s", p.kind, p.reason, lost)
			return nil
		}
		lost = fmt.Sprintf("%s; not %s: %v", lost, p.kind, err)
	}
	return fmt.Errorf("no engine serves this file%s", lost)
}

func askedFor(kind EngineKind, t traits) string {
	switch {
	case kind == EngineLinuxAIO && !t.direct && !t.inMemory:
		return "linux-aio: asked for (not a direct file: io_submit does the I/O itself and holds up the loop meanwhile)"
	case kind == EngineIOUring && !t.noWait:
		return "io_uring: asked for (file answers EOPNOTSUPP to RWF_NOWAIT: each request is punted to a kernel worker)"
	}
	return kind.String() + ": asked for"
}

func (f *File) attachTo(kind EngineKind) error {
	e, err := f.loop.engineFor(kind)
	if err != nil {
		return err
	}
	if err := e.attach(f); err != nil {
		return fmt.Errorf("attach to engine %s: %w", kind, err)
	}
	f.engine = e
	return nil
}

// engineFor gives the loop's engine of a kind and makes it at first use. All files of the loop share it, so that
// requests to many files leave in one submission. Must be called on the loop.
func (l *Loop) engineFor(kind EngineKind) (engine, error) {
	if int(kind) >= len(l.engines) || kind == EngineAuto {
		return nil, fmt.Errorf("no such engine: %s", kind)
	}
	if l.engines[kind] != nil {
		return l.engines[kind], nil
	}
	e, err := l.makeEngine(kind)
	if err != nil {
		return nil, err
	}
	l.engines[kind] = e
	return e, nil
}

func (l *Loop) makeEngine(kind EngineKind) (engine, error) {
	switch kind {
	case EngineIOUring:
		if l.ring == nil {
			return nil, fmt.Errorf("engine io_uring needs a loop whose poller is io_uring, and this one's is %s: %w (%s)",
				l.poller.kind(), ErrNotSupported, l.reason)
		}
		return newUringEngine(l)
	case EngineLinuxAIO:
		return newLaioEngine(l)
	}
	return newThreadsEngine(l)
}
