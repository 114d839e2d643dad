// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/sys"
)

// pinBed is a direct file on a loop that pins memory.
func pinBed(t *testing.T) (*engineBed, *File) {
	b := newEngineBed(t, engineSetup{EngineIOUring, PollerIOUring, true}, func(o *LoopOptions) { o.FixedBuffers = true })
	return b, b.file(8 << 20)
}

func (b *engineBed) pins() PinCounters { return b.l.snapshot().Pins }

// Memory is pinned where it is used, and what goes through it is what went in.
func TestRegisteredMemoryServesRequests(t *testing.T) {
	b, f := pinBed(t)
	mem := b.buffer(3*pinChunk + page)
	all := []IOVec{IOVecOf(mem)}
	b.l.RegisterMemory(all)
	b.l.RegisterMemory(all) // another user
	if n := b.pins(); n.Pinned != 0 {
		t.Errorf("%d bytes are pinned before any request", n.Pinned)
	}
	chunk := mem[pinChunk : 2*pinChunk]
	for round := range 4 {
		w, r := chunk[:page], chunk[page:2*page]
		pattern(w, int64(round))
		durable := b.ask(OpWrite, 0, w)
		durable.Flags = FlagFUA
		b.must(f, durable)
		b.must(f, b.ask(OpRead, 0, r))
		if !bytes.Equal(w, r) {
			t.Fatalf("round %d: other bytes came back", round)
		}
	}
	n := b.pins()
	if n.Refused != "" {
		t.Skipf("needs a kernel that registers memory: %s", n.Refused)
	}
	if n.Pinned != pinChunk || n.Fixed != 7 { // all but the first
		t.Errorf("%+v after 8 requests in one chunk", n)
	}
	// Neither what crosses chunks nor vectors can be named so; and the last chunk is a short one.
	b.must(f, b.ask(OpRead, 0, mem[pinChunk-page:pinChunk+page]), b.ask(OpRead, 0, mem[:page], chunk[:page]))
	for range 2 {
		b.must(f, b.ask(OpRead, 0, mem[3*pinChunk:]))
	}
	if n := b.pins(); n.Pinned != pinChunk+page || n.Fixed != 8 {
		t.Errorf("%+v after requests elsewhere", n)
	}

	b.l.UnregisterMemory(all)
	b.must(f, b.ask(OpRead, 0, chunk[:page]))
	if n := b.pins(); n.Fixed != 9 {
		t.Errorf("%+v with one user left", n)
	}
	b.l.UnregisterMemory(all)
	b.must(f, b.ask(OpRead, 0, chunk[:page]))
	for len(b.l.pins.stale) > 0 {
		b.l.turn(int64(enginePatience))
	}
	if n := b.pins(); n.Fixed != 9 || n.Pinned != 0 || len(b.l.pins.free) != pinPlaces {
		t.Errorf("%+v, %d places free after the last user has gone", n, len(b.l.pins.free))
	}
}

// To tell of a large guest costs nothing.
func TestRegisteredMemoryOfALargeGuest(t *testing.T) {
	b, f := pinBed(t)
	guest, err := sys.Mmap(-1, 0, 16<<30, sys.PROT_READ|sys.PROT_WRITE, sys.MAP_PRIVATE|sys.MAP_ANONYMOUS|sys.MAP_NORESERVE)
	if err != nil {
		t.Skipf("needs 16 GiB of address space: %v", err)
	}
	defer sys.Munmap(guest)
	all := []IOVec{IOVecOf(guest)}
	b.l.RegisterMemory(all)
	for range 2 {
		b.must(f, b.ask(OpRead, 0, guest[len(guest)-page:]))
	}
	if n := b.pins(); n.Pinned > pinChunk {
		t.Errorf("%+v after one page was used", n)
	}
	b.l.UnregisterMemory(all)
}

// The kernel pins no shared mapping of an ordinary file. Requests then go the ordinary way, and the reason is told.
func TestMemoryThatCannotBePinned(t *testing.T) {
	b, f := pinBed(t)
	other, err := os.OpenFile(filepath.Join(b.dir, "mapped"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.Truncate(page); err != nil {
		t.Fatal(err)
	}
	mem, err := sys.Mmap(int(other.Fd()), 0, page, sys.PROT_READ|sys.PROT_WRITE, sys.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Munmap(mem)
	b.l.RegisterMemory([]IOVec{IOVecOf(mem)})
	good := b.buffer(page)
	b.l.RegisterMemory([]IOVec{IOVecOf(good)})
	for range 3 {
		b.must(f, b.ask(OpWrite, 0, mem), b.ask(OpRead, page, mem))
	}
	n := b.pins()
	if n.Refused == "" {
		t.Skip("needs a kernel that does not pin shared mappings of files")
	}
	if n.Fixed != 0 || n.Pinned != 0 || !strings.Contains(n.Refused, "update 1 buffers") {
		t.Errorf("%+v", n)
	}
	for range 2 { // nothing else is tried after a refusal
		b.must(f, b.ask(OpRead, 0, good))
	}
	if n := b.pins(); n.Pinned != 0 {
		t.Errorf("%+v after the refusal", n)
	}
}

func TestRegisteredMemoryNeedsTheRing(t *testing.T) {
	l, err := NewLoop(&LoopOptions{Poller: PollerEpoll, FixedBuffers: true})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	mem := []IOVec{IOVecOf(make([]byte, page))}
	l.UnregisterMemory(mem)
	l.RegisterMemory(mem)
	if n := l.Stats().Pins; !strings.Contains(n.Refused, "poller is epoll") {
		t.Errorf("%+v", n)
	}
	l.UnregisterMemory(mem)
	off, err := NewLoop(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer off.Close()
	off.RegisterMemory(mem)
	if off.pins != nil {
		t.Error("a loop that was not told to pins memory")
	}
}
