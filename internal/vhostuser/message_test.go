// SPDX-License-Identifier: Apache-2.0

package vhostuser_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-blk/sluice/internal/guestmem"
	. "github.com/sluice-blk/sluice/internal/vhostuser"
)

// The codec is pure, so it is tested by itself: what is written reads back the same, and every payload that the
// protocol's document does not describe is refused with ErrMalformed.

func TestPayloadsReadBackAsWritten(t *testing.T) {
	h := Header{Request: SetMemTable, Flags: FlagVersion | FlagNeedReply, Size: 72}
	if got, err := ParseHeader(h.Append(nil)); err != nil || got != h {
		t.Errorf("header: %+v, %v, want %+v", got, err, h)
	}
	state := VringState{Index: 3, Num: 1 << 31}
	if got, err := ParseVringState(state.Append(nil)); err != nil || got != state {
		t.Errorf("vring state: %+v, %v, want %+v", got, err, state)
	}
	addr := VringAddr{Index: 1, Flags: 2, Desc: 3, Used: 4, Avail: 5, Log: 6}
	if got, err := ParseVringAddr(addr.Append(nil)); err != nil || got != addr {
		t.Errorf("vring address: %+v, %v, want %+v", got, err, addr)
	}
	regions := []guestmem.Region{{GuestAddr: 1, Size: 2, UserAddr: 3, Offset: 4, FD: -1}, {GuestAddr: 5, Size: 6, UserAddr: 7, Offset: 8, FD: -1}}
	got, err := ParseMemTable(AppendMemTable(nil, regions))
	if diff := cmp.Diff(regions, got); err != nil || diff != "" {
		t.Errorf("memory table: %v %s", err, diff)
	}
	if got, err := ParseMemReg(AppendMemReg(nil, regions[1])); err != nil || got != regions[1] {
		t.Errorf("memory region: %+v, %v, want %+v", got, err, regions[1])
	}
	config := ConfigSpace{Offset: 32, Size: 4, Flags: 1, Data: []byte("wxyz")}
	gotc, err := ParseConfig(config.Append(nil), true)
	if diff := cmp.Diff(config, gotc); err != nil || diff != "" {
		t.Errorf("config space: %v %s", err, diff)
	}
	if index, has, err := ParseVringFile(AppendU64(nil, 200|VringNoFD)); err != nil || index != 200 || has {
		t.Errorf("vring file: %d, %v, %v", index, has, err)
	}
}

func TestMemTableOfEightPlacesIsUnderstood(t *testing.T) {
	full := append(AppendMemTable(nil, []guestmem.Region{{Size: 1}}), make([]byte, 7*32)...)
	if got, err := ParseMemTable(full); err != nil || len(got) != 1 {
		t.Errorf("got %d regions, %v", len(got), err)
	}
}

func TestMalformedPayloadsAreRefused(t *testing.T) {
	header := func(flags, size uint32) []byte {
		return Header{Request: GetFeatures, Flags: flags, Size: size}.Append(nil)
	}
	config := func(offset, size uint32, data int) []byte {
		return ConfigSpace{Offset: offset, Size: size, Data: make([]byte, data)}.Append(nil)
	}
	parseHeader := func(p []byte) error { _, err := ParseHeader(p); return err }
	parseU64 := func(p []byte) error { _, err := ParseU64(p); return err }
	parseState := func(p []byte) error { _, err := ParseVringState(p); return err }
	parseAddr := func(p []byte) error { _, err := ParseVringAddr(p); return err }
	parseFile := func(p []byte) error { _, _, err := ParseVringFile(p); return err }
	parseTable := func(p []byte) error { _, err := ParseMemTable(p); return err }
	parseReg := func(p []byte) error { _, err := ParseMemReg(p); return err }
	readConfig := func(p []byte) error { _, err := ParseConfig(p, false); return err }
	writeConfig := func(p []byte) error { _, err := ParseConfig(p, true); return err }
	table := func(n uint32, regions int) []byte {
		return append(VringState{Index: n}.Append(nil), make([]byte, 32*regions)...)
	}
	for _, c := range []struct {
		name  string
		parse func([]byte) error
		p     []byte
	}{
		{"half a header", parseHeader, make([]byte, 6)},
		{"version 0", parseHeader, header(0, 0)},
		{"version 2", parseHeader, header(2, 0)},
		{"payload of 4 KiB and a byte", parseHeader, header(FlagVersion, MaxBody+1)},
		{"payload of 4 GiB", parseHeader, header(FlagVersion, 0xfffffff0)},
		{"number of 4 bytes", parseU64, make([]byte, 4)},
		{"number of 9 bytes", parseU64, make([]byte, 9)},
		{"state of 4 bytes", parseState, make([]byte, 4)},
		{"address of 39 bytes", parseAddr, make([]byte, 39)},
		{"address of 48 bytes", parseAddr, make([]byte, 48)},
		{"file with unknown flag", parseFile, AppendU64(nil, 1<<9)},
		{"file with high bit", parseFile, AppendU64(nil, 1<<63)},
		{"empty table", parseTable, nil},
		{"table of 9 regions", parseTable, table(9, 9)},
		{"table that says 4000", parseTable, table(4000, 8)},
		{"table that says 2^32-1", parseTable, table(1<<32-1, 8)},
		{"table of 2 with room for 1", parseTable, table(2, 1)},
		{"table of 1 with room for 2", parseTable, table(1, 2)},
		{"region of 32 bytes", parseReg, make([]byte, 32)},
		{"config of 11 bytes", readConfig, make([]byte, 11)},
		{"config of no bytes", readConfig, config(0, 0, 0)},
		{"config of 257 bytes", readConfig, config(0, 257, 257)},
		{"config that wraps", readConfig, config(0xfffffff0, 60, 60)},
		{"config with another size of data", readConfig, config(0, 60, 59)},
		{"config write without data", writeConfig, config(0, 4, 0)},
	} {
		if err := c.parse(c.p); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v, want %v", c.name, err, ErrMalformed)
		}
	}
}

func TestRequestsHaveTheDocumentsNames(t *testing.T) {
	for r, want := range map[Request]string{1: "GET_FEATURES", 21: "SET_BACKEND_REQ_FD", 40: "GET_STATUS", 0: "message 0",
		45: "message 45", 1<<32 - 1: "message 4294967295"} {
		if got := r.String(); got != want {
			t.Errorf("request %d: %q, want %q", uint32(r), got, want)
		}
	}
}

// FuzzMessage reads any bytes as each kind of payload. What is accepted must read back as it was.
func FuzzMessage(f *testing.F) {
	f.Add([]byte{})
	f.Add(AppendMessage(nil, GetFeatures, 0, nil))
	f.Add(AppendMemTable(nil, []guestmem.Region{{GuestAddr: 1, Size: 4096, UserAddr: 8192}}))
	f.Add(AppendMemTable(nil, make([]guestmem.Region, 8)))
	f.Add(AppendMemReg(nil, guestmem.Region{Size: 1 << 62}))
	f.Add(VringAddr{Index: 1, Desc: 16}.Append(nil))
	f.Add(AppendU64(nil, 200|VringNoFD))
	f.Add(ConfigSpace{Offset: 0xfffffff0, Size: 60, Data: make([]byte, 60)}.Append(nil))
	f.Fuzz(func(t *testing.T, p []byte) {
		if h, err := ParseHeader(p); err == nil && (h.Size > MaxBody || !bytes.Equal(h.Append(nil), p[:HeaderSize])) {
			t.Errorf("header %+v of %x", h, p)
		}
		if v, err := ParseU64(p); err == nil && !bytes.Equal(AppendU64(nil, v), p) {
			t.Errorf("number %d of %x", v, p)
		}
		if v, err := ParseVringState(p); err == nil && !bytes.Equal(v.Append(nil), p) {
			t.Errorf("state %+v of %x", v, p)
		}
		if v, err := ParseVringAddr(p); err == nil && !bytes.Equal(v.Append(nil), p) {
			t.Errorf("address %+v of %x", v, p)
		}
		if index, _, err := ParseVringFile(p); err == nil && (index < 0 || index > 255) {
			t.Errorf("queue %d of %x", index, p)
		}
		if regions, err := ParseMemTable(p); err == nil && !bytes.HasPrefix(p[8:], AppendMemTable(nil, regions)[8:]) {
			t.Errorf("table %+v of %x", regions, p)
		}
		if r, err := ParseMemReg(p); err == nil && !bytes.Equal(AppendMemReg(nil, r)[8:], p[8:]) {
			t.Errorf("region %+v of %x", r, p)
		}
		if c, err := ParseConfig(p, true); err == nil && (len(c.Data) > MaxConfig || !bytes.Equal(c.Append(nil), p)) {
			t.Errorf("config %+v of %x", c, p)
		}
		if len(p) >= 4 && strings.TrimSpace(Request(p[0]).String()) == "" {
			t.Errorf("request %d has no name", p[0])
		}
	})
}
