// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/sluice-blk/sluice/internal/graph"
)

// layer is one image of a backing chain.
type layer struct {
	src  Source
	name string // as the image above it has it
	info *Info
	path string // of its file
}

// backingLayers are the images behind the one that info tells of, the nearest first. Files are looked at without keeping
// them open.
func backingLayers(info *Info, store StoreOptions) ([]layer, error) {
	src, ok := info.Backing(store)
	if !ok {
		return nil, nil
	}
	infos, err := InfoChain(src)
	if err != nil {
		return nil, err
	}
	name := info.BackingFilename
	var layers []layer
	for _, i := range infos {
		at, err := src.locate()
		if err != nil {
			return nil, err
		}
		src.Format = i.Format
		layers = append(layers, layer{src: src, name: name, info: i, path: at.Path})
		name = i.BackingFilename
		src, _ = i.Backing(store)
	}
	return layers, nil
}

// namedLayer is the index of the layer that name means, as one of the images above it would name it: relative to its own
// folder, or from the root on. -1 is none.
func namedLayer(top string, layers []layer, name string) int {
	above := top
	for i, l := range layers {
		if at, err := ParseName(Beside(above, name)); err == nil && (name == l.name || sameFile(at.Path, l.path)) {
			return i
		}
		above = l.path
	}
	return -1
}

// layerOf is the index of the layer whose file is the one at path; -1 is none.
func layerOf(layers []layer, path string) int {
	return slices.IndexFunc(layers, func(l layer) bool { return sameFile(path, l.path) })
}

func sameFile(a, b string) bool {
	x, errX := os.Stat(a)
	y, errY := os.Stat(b)
	return errX == nil && errY == nil && os.SameFile(x, y)
}

// chainSpec describes layers one behind the other, with nothing behind the last one. It is nil without layers.
func chainSpec(layers []layer, cache Cache, shared bool) *graph.Spec {
	var next *graph.Spec
	file, _ := cache.modes()
	for i := len(layers) - 1; i >= 0; i-- {
		l := layers[i]
		s := &graph.Spec{Path: l.path, Format: l.src.Format, ReadOnly: true, Cache: file, Backing: next}
		if shared {
			s.Lock = graph.LockShared
		}
		if l.src.Format == FormatQcow2 {
			s.NoBacking = next == nil
		}
		next = s
	}
	return next
}

// openTop opens an image for a verb that changes it, with its lock, and tells what it is.
func openTop(src Source) (i *Image, info *Info, err error) {
	if i, err = OpenImage(src); err != nil {
		return nil, nil, err
	}
	if info, err = i.Info(); err != nil {
		return nil, nil, errors.Join(Wordedf("Could not open '%s': %s", src.Name, err.Error()), i.Close())
	}
	return i, info, nil
}

// backingError words a failure to open what stands behind an image: with the file that cannot be opened, when that is it.
func backingError(src Source, info *Info, err error) error {
	if b, ok := info.Backing(StoreOptions{ReadOnly: true, Shared: src.Store.Shared}); ok {
		if text := backingFault(b, maxChain); text != "" {
			return &Worded{text: fmt.Sprintf("Could not open '%s': Could not open backing file: %s", src.Name, text), err: err}
		}
	}
	return &Worded{text: fmt.Sprintf("Could not open '%s': %s", src.Name, graphText(src.Name, err)), err: err}
}

// backingFault tells why an image of a chain, or one behind it, cannot be opened; "" when nothing is found.
func backingFault(src Source, depth int) string {
	i, err := openImage(src)
	if err != nil {
		return OpenText(src.Name, err)
	}
	info, err := i.Info()
	if err = errors.Join(err, i.Close()); err != nil {
		return err.Error()
	}
	b, ok := info.Backing(src.Store)
	if !ok || depth == 0 {
		return ""
	}
	if text := backingFault(b, depth-1); text != "" {
		return "Could not open backing file: " + text
	}
	return ""
}
