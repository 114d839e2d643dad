// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"fmt"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Restriction is one thing that a restricted ring may do: the kernel's struct io_uring_restriction. Make it with
// [AllowOp], [AllowRegister], [AllowFlags] or [RequireFlags].
type Restriction struct {
	opcode uint16
	arg    uint8
	_      uint8
	_      [3]uint32
}

// AllowOp allows an operation (IORING_OP_).
func AllowOp(op uint8) Restriction { return Restriction{opcode: 1, arg: op} }

// AllowRegister allows an opcode of io_uring_register(2).
func AllowRegister(opcode uint8) Restriction { return Restriction{opcode: 0, arg: opcode} }

// AllowFlags allows IOSQE_ bits.
func AllowFlags(flags uint8) Restriction { return Restriction{opcode: 2, arg: flags} }

// RequireFlags demands IOSQE_ bits of every entry.
func RequireFlags(flags uint8) Restriction { return Restriction{opcode: 3, arg: flags} }

// Restrict limits the ring for good to what rs allow: other operations complete with EACCES, other registrations fail
// with it. The ring must be disabled still (Options.RDisabled), and can be restricted once.
func (r *Ring) Restrict(rs ...Restriction) error {
	_, err := r.register(fmt.Sprintf("restrict ring to %d rules", len(rs)), sys.IORING_REGISTER_RESTRICTIONS,
		unsafe.Pointer(unsafe.SliceData(rs)), uint32(len(rs)))
	return err
}
