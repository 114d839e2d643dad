// SPDX-License-Identifier: Apache-2.0

package null_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/null"
)

func TestConformance(t *testing.T) {
	for name, latency := range map[string]time.Duration{"at once": 0, "late": 50 * time.Microsecond} {
		t.Run(name, func(t *testing.T) {
			blocktest.Conform(t, blocktest.Subject{KeepsNothing: true, Open: func(t *testing.T, size int64) block.Node {
				return null.New(null.Options{Size: size, Latency: latency})
			}})
		})
	}
}

func TestLatencyAndZeroes(t *testing.T) {
	const latency = 20 * time.Millisecond
	h := block.NewHandle(null.New(null.Options{Size: 1 << 30, Latency: latency, ReadZeroes: true}), nil)
	defer h.Close()
	d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
	defer d.Close()
	b := bytes.Repeat([]byte{1}, 200000)
	before := time.Now()
	if err := d.Read(1000, b[:100], b[100:]); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(before); took < latency {
		t.Errorf("a request took %v, want at least %v", took, latency)
	}
	if !bytes.Equal(b, make([]byte, len(b))) {
		t.Error("what was read is not zero")
	}
}

func TestReadOnly(t *testing.T) {
	h := block.NewHandle(null.New(null.Options{Size: 4096, ReadOnly: true}), nil)
	defer h.Close()
	d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
	defer d.Close()
	if err := d.Write(0, make([]byte, 1)); !errors.Is(err, block.ErrReadOnly) {
		t.Error(err)
	}
}
