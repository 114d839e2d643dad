// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Probe tells which operations a kernel has. Safe for concurrent use.
type Probe struct {
	header struct {
		lastOp uint8
		opsLen uint8
		_      uint16
		_      [3]uint32
	}
	ops [256]probeOp
}

type probeOp struct {
	op    uint8
	_     uint8
	flags uint16
	_     uint32
}

const probeOpSupported = 1 << 0

// Probe asks the kernel which operations it has.
func (r *Ring) Probe() (*Probe, error) {
	p := new(Probe)
	if _, err := r.register("probe operations", sys.IORING_REGISTER_PROBE, unsafe.Pointer(p), uint32(len(p.ops))); err != nil {
		return nil, err
	}
	return p, nil
}

// Supports reports whether the kernel has operation op (IORING_OP_). It says nothing of an operation's flags.
func (p *Probe) Supports(op uint8) bool {
	return op < p.header.opsLen && p.ops[op].flags&probeOpSupported != 0
}
