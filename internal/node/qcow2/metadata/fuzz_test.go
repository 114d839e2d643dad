// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// bounded is a store that refuses to grow without end, as file systems do.
type bounded struct{ *memStore }

func (b bounded) Write(p []byte, off int64) error {
	if off < 0 || off+int64(len(p)) > 16<<20 {
		return syscall.EFBIG
	}
	return b.memStore.Write(p, off)
}

// FuzzImage opens damaged images and uses them: whatever they say, there is an error or an answer, in bounded time and
// memory, and a file that is open for reading is not changed.
func FuzzImage(f *testing.F) {
	for _, o := range []create.Options{
		{Size: 64 << 10, ClusterSize: 512}, {Size: 1 << 20, ClusterSize: 4096, Version: 2},
		{Size: 256 << 10, ClusterSize: 16384, ExtendedL2: true, LazyRefcounts: true}, {Size: 64 << 10, ClusterSize: 512, RefcountBits: 1},
	} {
		s := &memStore{}
		if _, err := create.Create(s, &o); err != nil {
			f.Fatal(err)
		}
		m, err := Open(s, nil)
		if err != nil {
			f.Fatal(err)
		}
		g := newGuest(m, s)
		r := rand.New(rand.NewPCG(1, 1))
		for range 30 {
			if _, err := g.step(r); err != nil {
				f.Fatal(err)
			}
		}
		if o.RefcountBits != 1 {
			_, _ = m.CreateSnapshot(SnapshotInfo{Name: "s"})
		}
		if o.Version != 2 {
			_ = m.AddBitmap("b", 512, true)
		}
		if err := m.Close(); err != nil {
			f.Fatal(err)
		}
		f.Add(s.data, uint32(0), uint64(0))
		f.Add(s.data, uint32(s.h(f).L1Offset), uint64(1<<63|0x600))
		f.Add(s.data, uint32(s.h(f).RefcountTableOffset), uint64(0x200))
	}
	f.Fuzz(func(t *testing.T, image []byte, at uint32, word uint64) {
		if len(image) > 4<<20 {
			t.Skip("too large")
		}
		s := &memStore{data: append([]byte(nil), image...)}
		if word != 0 && int64(at)+8 <= int64(len(image)) {
			put64(s, int64(at), word)
		}
		use(t, s.clone(), &Options{ReadOnly: true})
		use(t, s.clone(), &Options{Data: &memStore{}})
	})
}

func (s *memStore) h(f *testing.F) (fields struct{ L1Offset, RefcountTableOffset int64 }) {
	m, err := Open(s, &Options{ReadOnly: true})
	if err != nil {
		f.Fatal(err)
	}
	fields.L1Offset, fields.RefcountTableOffset = m.h.L1Offset, m.h.RefcountTableOffset
	return fields
}

func use(t *testing.T, s *memStore, o *Options) {
	before := append([]byte(nil), s.data...)
	store := bounded{s}
	m, err := Open(store, o)
	if err != nil {
		return
	}
	g := &guest{m: m, s: store, disk: make([]byte, min(m.Size(), 1<<20))}
	if m.Size() >= 512 {
		for off := int64(0); off < int64(len(g.disk)); off += 8192 {
			_ = g.read(make([]byte, min(8192, int64(len(g.disk))-off)), off)
		}
		x, err := m.Map(m.Size()-512, 512)
		if err == nil && x.Length != 512 {
			t.Errorf("extent at the end is %+v", x)
		}
	}
	for _, sn := range m.Snapshots() {
		if v, err := m.OpenSnapshot(sn.ID); err == nil && v.Size() >= 512 {
			_, _ = v.Map(0, 512)
		}
	}
	if o.ReadOnly {
		if !bytes.Equal(before, s.data) {
			t.Error("file has changed")
		}
		return
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 12 {
		if len(g.disk) < 4096 {
			break
		}
		off := r.Int64N(int64(len(g.disk))/512-1) * 512
		n := min(int64(len(g.disk))-off, 4096)
		_ = g.write(make([]byte, n), off)
		_ = m.Discard(off, n)
		_ = m.Commit()
	}
	_, err = m.CreateSnapshot(SnapshotInfo{Name: "x"})
	if err == nil {
		_ = m.DeleteSnapshot("x")
	}
	_ = m.RemoveBitmap("b")
	_ = m.Resize(m.Size()+512, false)
	if err := m.Close(); err != nil && errors.Is(err, syscall.EDEADLK) {
		t.Error(err)
	}
}
