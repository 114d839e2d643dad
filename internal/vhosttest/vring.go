// SPDX-License-Identifier: Apache-2.0

package vhosttest

import (
	"fmt"

	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// Vring is what a ring needs. Addresses are the front-end's own: those of a [Memory], or whatever its regions say.
type Vring struct {
	Index             int
	Size              int
	Base              uint16
	Desc, Avail, Used uint64
	Kick              int
	Call, Err         int // -1: none
}

// SetVring sets a ring up and starts it, with the messages in QEMU's order.
func (f *Frontend) SetVring(v Vring) error {
	if err := f.SetVringNum(v.Index, uint32(v.Size)); err != nil {
		return err
	}
	if err := f.SetVringBase(v.Index, uint32(v.Base)); err != nil {
		return err
	}
	if err := f.SetVringAddr(v.Index, v.Desc, v.Avail, v.Used); err != nil {
		return err
	}
	if v.Err >= 0 {
		if err := f.SetVringErr(v.Index, v.Err); err != nil {
			return err
		}
	}
	if err := f.SetVringKick(v.Index, v.Kick); err != nil {
		return err
	}
	if err := f.SetVringCall(v.Index, v.Call); err != nil {
		return err
	}
	if f.Features&vhostuser.FeatureProtocolFeatures == 0 {
		return nil
	}
	return f.SetVringEnable(v.Index, true)
}

func (f *Frontend) state(r vhostuser.Request, index int, num uint32) error {
	return f.Tell(r, vhostuser.VringState{Index: uint32(index), Num: num}.Append(nil))
}

// SetVringNum sets the number of entries.
func (f *Frontend) SetVringNum(index int, num uint32) error {
	return f.state(vhostuser.SetVringNum, index, num)
}

// SetVringBase sets the index of the next available entry.
func (f *Frontend) SetVringBase(index int, base uint32) error {
	return f.state(vhostuser.SetVringBase, index, base)
}

// SetVringEnable enables or disables a ring.
func (f *Frontend) SetVringEnable(index int, on bool) error {
	num := uint32(0)
	if on {
		num = 1
	}
	return f.state(vhostuser.SetVringEnable, index, num)
}

// SetVringAddr sets the user addresses of the ring's parts.
func (f *Frontend) SetVringAddr(index int, desc, avail, used uint64) error {
	a := vhostuser.VringAddr{Index: uint32(index), Desc: desc, Avail: avail, Used: used}
	return f.Tell(vhostuser.SetVringAddr, a.Append(nil))
}

func (f *Frontend) file(r vhostuser.Request, index, fd int) error {
	if fd < 0 {
		return f.TellU64(r, uint64(index)|vhostuser.VringNoFD)
	}
	return f.TellU64(r, uint64(index), fd)
}

// SetVringKick sets the kick descriptor, which stays the caller's; -1: none, the back-end is to poll.
func (f *Frontend) SetVringKick(index, fd int) error {
	return f.file(vhostuser.SetVringKick, index, fd)
}

// SetVringCall sets the call descriptor, which stays the caller's; -1: none.
func (f *Frontend) SetVringCall(index, fd int) error {
	return f.file(vhostuser.SetVringCall, index, fd)
}

// SetVringErr sets the error descriptor, which stays the caller's; -1: none.
func (f *Frontend) SetVringErr(index, fd int) error { return f.file(vhostuser.SetVringErr, index, fd) }

// GetVringBase stops a ring, waits until it has drained, and tells the index of the next available entry.
func (f *Frontend) GetVringBase(index int) (uint16, error) {
	p, err := f.Ask(vhostuser.GetVringBase, vhostuser.VringState{Index: uint32(index)}.Append(nil))
	if err != nil {
		return 0, err
	}
	v, err := vhostuser.ParseVringState(p)
	switch {
	case err != nil:
		return 0, fmt.Errorf("answer to %v: %w", vhostuser.GetVringBase, err)
	case v.Index != uint32(index) || v.Num > 0xffff:
		return 0, fmt.Errorf("answer to %v of queue %d: queue %d, base %d", vhostuser.GetVringBase, index, v.Index, v.Num)
	}
	return uint16(v.Num), nil
}
