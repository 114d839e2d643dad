// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"os"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/sys"
)

// holes finds what of the data of qcow2 images are holes of their files, and so zeros: an image whose clusters were
// preallocated without being written calls all of them data. Only images of which a good part is not there are looked
// into. It belongs to one goroutine.
type holes struct {
	files map[string]*holedFile
}

// holedFile is the file of an image; f is nil for one that is not looked into.
type holedFile struct{ f *os.File }

func newHoles() *holes { return &holes{files: make(map[string]*holedFile)} }

// Close closes the files that were looked into.
func (h *holes) Close() error {
	var err error
	for _, f := range h.files {
		if f.f != nil {
			err = errors.Join(err, f.f.Close())
		}
	}
	return err
}

// refine calls each for an extent, in parts where some of it is a hole.
func (h *holes) refine(e block.Extent, each func(block.Extent) error) error {
	if !e.Data || e.Zero || e.Compressed || e.Host < 0 {
		return each(e)
	}
	file := h.file(e.File)
	if file.f == nil {
		return each(e)
	}
	for e.Length > 0 {
		part := e
		part.Length, part.Zero = file.run(e.Host, e.Length)
		if err := each(part); err != nil {
			return err
		}
		e.Offset, e.Host, e.Length = e.Offset+part.Length, e.Host+part.Length, e.Length-part.Length
	}
	return nil
}

// file opens the file of an image, once. One that cannot be opened, or is not what it seemed, is not looked into.
func (h *holes) file(path string) *holedFile {
	if have, ok := h.files[path]; ok {
		return have
	}
	file := &holedFile{}
	h.files[path] = file
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return file
	}
	if preallocated(f) {
		file.f = f
	} else {
		_ = f.Close() // it was only read
	}
	return file
}

// preallocated tells that a file is a qcow2 image with a tenth of its clusters missing, and more than one.
func preallocated(f *os.File) bool {
	head := make([]byte, 512)
	var st sys.Stat_t
	if _, err := f.ReadAt(head, 0); err != nil || sys.Fstat(int(f.Fd()), &st) != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG {
		return false
	}
	cluster, err := qcow2.ClusterSize(head)
	if err != nil {
		return false
	}
	there, all := st.Blocks*512/int64(cluster), st.Size/int64(cluster)
	return all >= max(there*10/9, there+2)
}

// run tells how much of [off, off+n) from off on is a hole, or is none.
func (f *holedFile) run(off, n int64) (length int64, hole bool) {
	fd := int(f.f.Fd())
	data, err := sys.Lseek(fd, off, sys.SEEK_DATA)
	switch {
	case errors.Is(err, syscall.ENXIO):
		return n, true
	case err != nil:
		return n, false
	case data > off:
		return min(data-off, n), true
	}
	end, err := sys.Lseek(fd, off, sys.SEEK_HOLE)
	if err != nil || end <= off {
		return n, false
	}
	return min(end-off, n), false
}
