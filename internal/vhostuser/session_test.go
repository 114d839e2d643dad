// SPDX-License-Identifier: Apache-2.0

package vhostuser_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	. "github.com/sluice-blk/sluice/internal/vhostuser"
)

// The session is tested from the front-end's end of a socket pair, with a device that keeps a journal and checks that
// nothing which it was lent is taken away too early. After each test nothing may be open or running.

func TestRingStartsWhateverTheOrderOfMessages(t *testing.T) {
	names := []string{"features", "memory", "num", "base", "addr", "kick", "enable"}
	step := func(b *bench, name string) error {
		v := b.ring(0)
		switch name {
		case "features":
			return b.SetFeatures(b.Offered)
		case "memory":
			return b.SetMemTable(b.mem.Region())
		case "num":
			return b.SetVringNum(0, ringSize)
		case "base":
			return b.SetVringBase(0, 77)
		case "addr":
			return b.SetVringAddr(0, v.Desc, v.Avail, v.Used)
		case "kick":
			return b.SetVringKick(0, v.Kick)
		}
		return b.SetVringEnable(0, true)
	}
	b := open(t, newFake(), nil)
	b.negotiate()
	permute(names, func(order []string) {
		b.must(b.ResetDevice())
		b.must(b.SetMemTable()) // which a reset keeps
		for i, name := range order {
			b.runs(0, false)
			if err := step(b, name); err != nil {
				t.Fatalf("order %v: %s: %v", order, order[i], err)
			}
		}
		v, is := b.dev.vring(0)
		if !is || v.Size != ringSize || v.Base != 77 || !v.EventIdx || !v.Indirect {
			t.Fatalf("order %v: queue %+v, runs %v", order, v, is)
		}
	})
}

// permute calls f with every order of names.
func permute(names []string, f func([]string)) {
	var place func(k int)
	place = func(k int) {
		if k == len(names) {
			f(names)
			return
		}
		for i := k; i < len(names); i++ {
			names[k], names[i] = names[i], names[k]
			place(k + 1)
			names[k], names[i] = names[i], names[k]
		}
	}
	place(0)
}

func TestRingIsEnabledByItselfWithoutProtocolFeatures(t *testing.T) {
	b := open(t, newFake(), nil)
	b.must(b.Negotiate(allFeatures&^FeatureProtocolFeatures, ProtocolOffered))
	b.must(b.SetMemTable(b.mem.Region()))
	b.must(b.SetVring(b.ring(1)))
	b.runs(1, true)
	b.must(b.SetVringEnable(1, false)) // QEMU 7.2 sends it all the same
	b.runs(1, false)
	b.must(b.SetVringEnable(1, true))
	b.runs(1, true)
	b.must(b.Tell(ResetOwner, nil))
	b.runs(1, false)
	b.must(b.SetVringEnable(1, true))
	b.runs(1, false)
	b.must(b.SetVringKick(1, b.kicks[1]))
	b.runs(1, true)
}

func TestGettingTheBaseStopsTheRingAndDoesNotResetIt(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(2)
	b.dev.take(0, 10)
	for range 2 {
		if base, err := b.GetVringBase(0); err != nil || base != 10 {
			t.Fatalf("base %d, %v, want 10", base, err)
		}
		b.runs(0, false)
		b.runs(1, true)
	}
	b.must(b.SetVringEnable(0, true)) // is no kick
	b.runs(0, false)
	b.must(b.SetVringBase(0, 10))
	b.runs(0, false)
	from := b.dev.lines()
	b.must(b.SetVringKick(0, b.kicks[0]))
	b.journal(from, "start 0 size 128 base 10")
	b.dev.take(0, 10)
	if base, err := b.GetVringBase(0); err != nil || base != 20 {
		t.Fatalf("base %d, %v, want 20", base, err)
	}
}

func TestBaseOfARingThatNeverRanIsWhatWasSet(t *testing.T) {
	b := open(t, newFake(), nil)
	b.negotiate()
	b.must(b.SetVringBase(2, 65535))
	if base, err := b.GetVringBase(2); err != nil || base != 65535 {
		t.Fatalf("base %d, %v, want 65535", base, err)
	}
}

func TestDisablingIsNoReset(t *testing.T) {
	for _, newKick := range []bool{false, true} {
		b := open(t, newFake(), nil)
		b.start(1)
		b.dev.take(0, 7)
		b.must(b.SetVringEnable(0, false))
		b.runs(0, false)
		base, err := b.GetVringBase(0)
		if err != nil || base != 7 {
			t.Fatalf("base %d, %v, want 7", base, err)
		}
		b.must(b.SetVringBase(0, uint32(base)))
		b.runs(0, false)
		if newKick {
			b.must(b.SetVringKick(0, b.kicks[0]))
			b.runs(0, false)
		}
		from := b.dev.lines()
		b.must(b.SetVringEnable(0, true))
		b.journal(from, "start 0 size 128 base 7")
	}
}

func TestDisabledRingGoesOnWhereItWas(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	b.dev.take(0, 65535)
	from := b.dev.lines()
	b.must(b.SetVringEnable(0, false))
	b.must(b.SetVringEnable(0, false))
	b.must(b.SetVringEnable(0, true))
	b.must(b.SetVringEnable(0, true))
	b.journal(from, "stop 0 at 65535", "start 0 size 128 base 65535")
}

// A kick descriptor from before GET_VRING_BASE must not start a ring that is being set up anew: the old addresses, or a
// base that was not meant for them, would make the device do old requests again.
func TestOldKickDoesNotStartARingThatIsSetUpAnew(t *testing.T) {
	for name, change := range map[string]func(b *bench) error{
		"base": func(b *bench) error { return b.SetVringBase(0, 0) },
		"num":  func(b *bench) error { return errors.Join(b.SetVringNum(0, 64), b.SetVringBase(0, 5)) },
		"addr": func(b *bench) error {
			v := b.ring(3)
			return errors.Join(b.SetVringAddr(0, v.Desc, v.Avail, v.Used), b.SetVringBase(0, 5))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t, newFake(), nil)
			b.start(1)
			b.dev.take(0, 5)
			b.must(b.SetVringEnable(0, false))
			_, err := b.GetVringBase(0)
			b.must(err)
			b.must(change(b))
			b.must(b.SetVringEnable(0, true))
			b.runs(0, false)
			b.must(b.SetVringKick(0, b.kicks[0]))
			b.runs(0, true)
		})
	}
}

func TestRunningRingKeepsItsShape(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	from := b.dev.lines()
	b.must(b.SetVringNum(0, ringSize)) // no change
	v := b.ring(0)
	b.must(b.SetVringAddr(0, v.Desc, v.Avail, v.Used))
	for _, num := range []uint32{0, 3, 64, 1 << 20} {
		b.refused(b.SetVringNum(0, num))
	}
	b.refused(b.SetVringBase(0, 0xfff0))
	b.journal(from)
	moved := b.ring(3)
	b.must(b.SetVringAddr(0, moved.Desc, moved.Avail, moved.Used))
	b.journal(from, "stop 0 at 0", "start 0 size 128 base 0")
}

func TestBadQueueSizesAreRefused(t *testing.T) {
	b := open(t, newFake(), &ServerOptions{MaxQueueSize: 256})
	b.negotiate()
	for _, num := range []uint32{0, 3, 512, 1 << 20, 1 << 31, 1<<32 - 1} {
		b.refused(b.SetVringNum(0, num))
	}
	b.must(b.SetVringNum(0, 256))
	b.refused(b.SetVringBase(0, 1<<16))
}

func TestBadRingAddressesAreRefusedByTheMessageThatCompletesTheRing(t *testing.T) {
	b := open(t, newFake(), nil)
	b.negotiate()
	good := b.ring(0)
	end := b.mem.UserAddr(1 << 20)
	for name, bad := range map[string][3]uint64{
		"outside":      {0x1000, 0x2000, 0x3000},
		"across end":   {end - 64, end - 64, end - 64},
		"at the top":   {^uint64(15), good.Avail, good.Used},
		"unaligned":    {good.Desc + 8, good.Avail, good.Used},
		"odd avail":    {good.Desc, good.Avail + 1, good.Used},
		"used outside": {good.Desc, good.Avail, end},
	} {
		v := good
		v.Desc, v.Avail, v.Used = bad[0], bad[1], bad[2]
		if err := b.SetVring(v); !errors.Is(err, vhosttest.ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
		b.runs(0, false)
		_, err := b.GetVringBase(0)
		b.must(err)
	}
	b.refused(b.Tell(SetVringAddr, VringAddr{Flags: 1, Desc: good.Desc, Avail: good.Avail, Used: good.Used}.Append(nil)))
	b.must(b.SetVring(good))
	b.runs(0, true)
}

func TestQueueThatTheDeviceRefusesStaysStopped(t *testing.T) {
	b := open(t, newFake(), nil)
	b.negotiate()
	b.dev.failing("start", errors.New("no loop for it"))
	v := b.ring(0)
	b.refused(b.SetVring(v))
	b.runs(0, false)
	b.dev.failing("start", nil)
	b.must(b.SetVringKick(0, v.Kick))
	b.must(b.SetVringEnable(0, true))
	b.runs(0, true)
}

func TestKickReplacedWhileRunning(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	b.dev.take(0, 3)
	from := b.dev.lines()
	b.must(b.SetVringKick(0, eventfd(t)))
	b.journal(from, "stop 0 at 3", "start 0 size 128 base 3")
	b.refused(b.SetVringKick(0, -1)) // polling
	b.runs(0, true)
}

func TestCallReplacedWhileRunning(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	from := b.dev.lines()
	b.must(b.SetVringCall(0, eventfd(t)))
	b.must(b.SetVringCall(0, -1))
	b.must(b.SetVringCall(1, eventfd(t))) // not running: nothing to tell
	b.journal(from, "call 0 true", "call 0 false")
	b.dev.failing("call", errors.New("no"))
	b.refused(b.SetVringCall(0, eventfd(t)))
	b.runs(0, true)
	if v, _ := b.dev.vring(0); v.Call != -1 {
		t.Errorf("call descriptor %d, want -1", v.Call)
	}
}

func TestErrReplacedWhileRunning(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	b.must(b.SetVringErr(0, eventfd(t)))
	if v, is := b.dev.vring(0); !is || v.Err < 0 {
		t.Fatalf("err descriptor %d, runs %v", v.Err, is)
	}
	b.must(b.SetVringErr(0, -1))
	if v, is := b.dev.vring(0); !is || v.Err != -1 {
		t.Fatalf("err descriptor %d, runs %v", v.Err, is)
	}
}

func TestQueueIndicesAreChecked(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	for _, index := range []int{4, 200, 255} {
		b.refused(b.SetVringKick(index, b.kicks[0]))
		b.refused(b.SetVringCall(index, b.kicks[0]))
		b.refused(b.SetVringErr(index, -1))
	}
	for _, index := range []int{4, 0xffff, 0x7fffffff, 0xffffffff} {
		b.refused(b.SetVringNum(index, 128))
		b.refused(b.SetVringBase(index, 0))
		b.refused(b.SetVringEnable(index, true))
		b.refused(b.SetVringAddr(index, 0, 0, 0))
	}
	b.runs(0, true)
	if _, err := b.GetVringBase(0xffff); !errors.Is(err, io.EOF) { // it has no answer that tells of a failure
		t.Errorf("base of queue 65535: %v, want %v", err, io.EOF)
	}
	if err := b.end(); err == nil {
		t.Error("the session ended without an error")
	}
}

func TestLegacyFrontEndIsRefusedLoudly(t *testing.T) {
	for _, ack := range []bool{false, true} {
		b := open(t, newFake(), nil)
		protocol := ProtocolOffered
		if !ack {
			protocol &^= ProtocolReplyAck
		}
		b.must(b.Negotiate(allFeatures, protocol))
		err := b.SetFeatures(b.Offered &^ FeatureVersion1)
		if ack {
			b.refused(err)
		} else {
			b.must(err)
		}
		if _, err := b.AskU64(GetFeatures); err == nil {
			t.Error("the connection is still open")
		}
		if err := b.end(); !errors.Is(err, ErrLegacy) || !strings.Contains(err.Error(), "force-legacy=false") {
			t.Errorf("session ended with %v, want %v", err, ErrLegacy)
		}
	}
}

func TestFeaturesThatWereNotOfferedAreRefused(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	b.refused(b.SetFeatures(b.Offered | 1<<34)) // packed rings
	b.runs(0, true)
	b.refused(b.TellU64(SetProtocolFeatures, ProtocolOffered|1<<12))
	b.must(b.TellU64(SetProtocolFeatures, ProtocolOffered))
}

func TestFeaturesChangedWhileRunning(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(2)
	from := b.dev.lines()
	b.must(b.SetFeatures(b.Features))
	b.journal(from)
	b.must(b.SetFeatures(b.Features &^ FeatureEventIdx))
	b.journal(from, "stop 0 at 0", "stop 1 at 0", fmt.Sprintf("features %#x", b.Features&^FeatureProtocolFeatures),
		"start 0 size 128 base 0", "start 1 size 128 base 0")
	if v, _ := b.dev.vring(0); v.EventIdx || !v.Indirect {
		t.Errorf("queue %+v", v)
	}
	b.dev.failing("features", errors.New("no"))
	b.refused(b.SetFeatures(b.Offered))
	b.must(b.SetVringEnable(0, true)) // whatever comes: without features no ring runs
	b.runs(0, false)
}

func TestDeviceReset(t *testing.T) {
	for name, c := range map[string]struct {
		reset func(b *bench) error
		does  []string
	}{
		"message": {func(b *bench) error { return b.ResetDevice() }, []string{"stop 0 at 0", "stop 1 at 0", "reset"}},
		"status":  {func(b *bench) error { return b.SetStatus(0) }, []string{"stop 0 at 0", "stop 1 at 0"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t, newFake(), nil)
			b.start(2)
			from := b.dev.lines()
			b.must(c.reset(b))
			b.journal(from, c.does...)
			b.must(b.SetFeatures(b.Features)) // memory and protocol features are kept
			v := b.ring(0)
			b.must(b.SetVring(v))
			b.runs(0, true)
			b.runs(1, false)
		})
	}
}

// Goal: a machine that is paused goes on where it stopped. Method: what QEMU 7.2 says when it pauses and goes on.
func TestPausedMachineGoesOnWhereItStopped(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	b.must(b.SetStatus(15))
	b.dev.take(0, 33)
	from := b.dev.lines()
	b.must(b.SetStatus(0))
	b.must(b.SetVringEnable(0, false))
	base, err := b.GetVringBase(0)
	if err != nil || base != 33 {
		t.Fatalf("base %d, %v, want 33", base, err)
	}
	b.must(b.SetFeatures(b.Features))
	b.journal(from, "stop 0 at 33", fmt.Sprintf("features %#x", b.Features&^FeatureProtocolFeatures)) // and no reset of the device
	from = b.dev.lines()
	b.must(b.SetMemTable(b.mem.Region()))
	v := b.ring(0)
	b.must(b.SetVringNum(0, uint32(v.Size)))
	b.must(b.SetVringBase(0, uint32(base)))
	b.must(b.SetVringAddr(0, v.Desc, v.Avail, v.Used))
	b.must(b.SetVringKick(0, v.Kick))
	b.must(b.SetVringEnable(0, true))
	b.journal(from, "start 0 size 128 base 33")
	b.must(b.ResetDevice())
	if base, err := b.GetVringBase(0); err != nil || base != 0 {
		t.Fatalf("base %d after a reset, %v, want 0", base, err)
	}
}

func TestStatusIsKeptAndFeaturesOKNeedsFeatures(t *testing.T) {
	b := open(t, newFake(), nil)
	b.must(b.Negotiate(allFeatures, ProtocolOffered))
	status := func(set, want uint8) {
		t.Helper()
		b.must(b.SetStatus(set))
		if got, err := b.GetStatus(); err != nil || got != want {
			t.Fatalf("status %#x, %v, want %#x", got, err, want)
		}
	}
	status(11, 11)
	status(15, 15)
	status(0, 0)
	status(11, 3)
	b.refused(b.TellU64(SetStatus, 256))
}

func TestResetOwnerDisablesAllRings(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(2)
	from := b.dev.lines()
	b.must(b.Tell(ResetOwner, nil))
	b.journal(from, "stop 0 at 0", "stop 1 at 0")
	b.must(b.SetVringEnable(1, true))
	b.runs(1, true)
}

func TestConfigSpace(t *testing.T) {
	b := open(t, newFake(), nil)
	b.negotiate()
	if p, err := b.GetConfig(2, 8); err != nil || string(p) != "23456789" {
		t.Fatalf("config %q, %v", p, err)
	}
	for _, bad := range [][2]uint32{{3, 8}, {0, 256}, {10, 1}, {0xfffffff0, 4}, {0xfffffff0, 60}} {
		if _, err := b.GetConfig(bad[0], int(bad[1])); !errors.Is(err, vhosttest.ErrRefused) {
			t.Errorf("config at %#x, %d bytes: %v", bad[0], bad[1], err)
		}
	}
	for _, size := range []uint32{0, 257, 1 << 31} {
		p, err := b.Ask(GetConfig, ConfigSpace{Size: size, Data: make([]byte, 300)}.Append(nil))
		if err != nil || len(p) != 0 {
			t.Errorf("config of %d bytes: %d bytes, %v", size, len(p), err)
		}
	}
	b.must(b.SetConfig(4, []byte("x"), 0))
	b.must(b.SetConfig(5, []byte("y"), 1))
	b.refused(b.SetConfig(10, []byte("z"), 0))
	b.refused(b.SetConfig(0, []byte("z"), 2))
	if p, err := b.GetConfig(0, 10); err != nil || string(p) != "0123xy6789" {
		t.Fatalf("config %q, %v", p, err)
	}
}

func TestConfigOfADeviceThatIsGoneIsAnErrorAndNothingStale(t *testing.T) {
	b := open(t, newFake(), nil)
	b.negotiate()
	b.dev.mu.Lock()
	b.dev.gone = true
	b.dev.mu.Unlock()
	if p, err := b.GetConfig(0, 8); !errors.Is(err, vhosttest.ErrRefused) {
		t.Fatalf("config %q, %v", p, err)
	}
	b.sync()
}

func TestMessagesOfProtocolFeaturesThatWereNotNegotiatedAreRefused(t *testing.T) {
	b := open(t, newFake(), nil)
	b.must(b.Negotiate(allFeatures, ProtocolReplyAck))
	b.refused(b.SetConfig(0, []byte("x"), 0))
	b.refused(b.ResetDevice())
	b.refused(b.AddMemReg(b.mem.Region()))
	b.refused(b.RemMemReg(b.mem.Region()))
	b.refused(b.SetStatus(1))
	if _, err := b.GetConfig(0, 4); !errors.Is(err, vhosttest.ErrRefused) {
		t.Errorf("config: %v", err)
	}
	if n, err := b.AskU64(GetQueueNum); err != nil || n != 4 { // needs only to be offered
		t.Errorf("%d queues, %v", n, err)
	}
	if _, err := b.GetStatus(); !errors.Is(err, io.EOF) {
		t.Errorf("status: %v, want %v", err, io.EOF)
	}
}

func TestUnknownAndForeignMessages(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	fd := eventfd(t)
	for _, r := range []Request{0, 45, 9999, 1<<32 - 1, SetLogBase, SetLogFD, SendRARP, NetSetMTU, SetBackendReqFD,
		SetVringEndian, CloseCryptoSession, PostcopyListen, SetInflightFD, GPUSetSocket, VringKick} {
		b.must(b.Send(r, 0, make([]byte, 16), fd, fd))
		b.refused(b.Tell(r, make([]byte, MaxBody), fd))
	}
	b.sync()
	b.runs(0, true)
}

func TestMessagesWhoseAnswerWeLackEndTheSession(t *testing.T) {
	for _, r := range []Request{IOTLBMsg, CreateCryptoSession, PostcopyAdvise, PostcopyEnd, GetInflightFD, GetSharedObject,
		SetDeviceStateFD, CheckDeviceState, GetShmemConfig} {
		b := open(t, newFake(), nil)
		b.start(1)
		if p, err := b.Ask(r, make([]byte, 24)); !errors.Is(err, io.EOF) {
			t.Errorf("%v: %q, %v, want %v", r, p, err, io.EOF)
		}
	}
}

// One acknowledgement, when it is negotiated and asked for, and never a second reply. The number of replies shows by
// the answer to a message behind, which must be the next that comes.
func TestAcknowledgements(t *testing.T) {
	own := map[Request]bool{GetFeatures: true, GetProtocolFeatures: true, GetQueueNum: true, GetVringBase: true,
		GetConfig: true, GetMaxMemSlots: true, GetStatus: true}
	state := VringState{Num: 1}.Append(nil)
	payloads := map[Request][]byte{
		GetFeatures: nil, GetProtocolFeatures: nil, GetQueueNum: nil, GetMaxMemSlots: nil, GetStatus: nil, GetVringBase: state,
		GetConfig: ConfigSpace{Size: 4, Data: make([]byte, 4)}.Append(nil),
		SetOwner:  nil, ResetOwner: nil, SetVringNum: VringState{Num: 64}.Append(nil), SetVringBase: state,
		SetVringEnable: state, SetVringAddr: VringAddr{}.Append(nil), SetVringCall: AppendU64(nil, VringNoFD),
		SetVringErr: AppendU64(nil, VringNoFD), SetMemTable: AppendMemTable(nil, nil), ResetDevice: nil,
		SetStatus: AppendU64(nil, 1),
		SetConfig: ConfigSpace{Size: 1, Data: []byte("x")}.Append(nil),
	}
	refused := map[Request][]byte{SetVringKick: AppendU64(nil, VringNoFD), SetVringNum: state[:4], RemMemReg: nil, 9999: nil}
	for _, negotiated := range []bool{false, true} {
		for _, asked := range []bool{false, true} {
			b := open(t, newFake(), nil)
			protocol := ProtocolOffered
			if !negotiated {
				protocol &^= ProtocolReplyAck
			}
			b.must(b.Negotiate(allFeatures, protocol))
			try := func(r Request, payload []byte, want uint64) {
				t.Helper()
				flags := uint32(0)
				if asked {
					flags = FlagNeedReply
				}
				b.must(b.Send(r, flags, payload))
				switch {
				case own[r]:
					if _, err := b.Recv(r); err != nil {
						t.Fatal(err)
					}
				case negotiated && asked:
					p, err := b.Recv(r)
					if v, perr := ParseU64(p); err != nil || perr != nil || v != want {
						t.Fatalf("%v acknowledged with %d, %v, %v, want %d", r, v, err, perr, want)
					}
				}
				b.sync()
			}
			for r, payload := range payloads {
				try(r, payload, 0)
			}
			for r, payload := range refused {
				try(r, payload, 1)
			}
		}
	}
}

func TestProtocolFeaturesNeedNotBeAskedFor(t *testing.T) {
	b := open(t, newFake(), nil)
	b.must(b.Send(SetProtocolFeatures, 0, AppendU64(nil, ProtocolReplyAck|ProtocolStatus)))
	b.ProtocolFeatures = ProtocolReplyAck
	b.must(b.SetFeatures(FeatureVersion1))
	b.must(b.SetStatus(3))
	// Turned on and off by messages that ask for an acknowledgement themselves: the sender waits either way.
	b.must(b.TellU64(SetProtocolFeatures, 0))
	b.must(b.Send(SetOwner, FlagNeedReply, nil))
	b.must(b.TellU64(SetProtocolFeatures, ProtocolReplyAck))
	b.sync()
}

func TestStreamThatIsNoConversationIsClosed(t *testing.T) {
	message := func(r Request, flags, size uint32) []byte {
		return Header{Request: r, Flags: flags, Size: size}.Append(nil)
	}
	for name, raw := range map[string][]byte{
		"version 2":       message(GetFeatures, 2, 0),
		"reply":           message(GetFeatures, FlagVersion|FlagReply, 0),
		"4 GiB":           message(SetFeatures, FlagVersion, 0xfffffff0),
		"too large":       message(SetFeatures, FlagVersion, MaxBody+1),
		"half a header":   message(GetFeatures, FlagVersion, 0)[:6],
		"half a payload":  append(message(SetFeatures, FlagVersion, 8), 1, 2, 3),
		"payload missing": message(SetFeatures, FlagVersion, 8),
		"text":            []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
	} {
		b := open(t, newFake(), nil)
		b.start(1)
		b.must(b.SendRaw(raw, b.kicks[0]))
		b.must(b.Conn().CloseWrite())
		if err := b.end(); err == nil {
			t.Errorf("%s: the session ended without an error", name)
		}
	}
}

// A message that comes byte by byte is a message, with whatever descriptors came with each.
func TestMessageInPieces(t *testing.T) {
	b := open(t, newFake(), nil)
	b.negotiate()
	raw := AppendMessage(nil, SetVringCall, FlagNeedReply, AppendU64(nil, 0))
	b.must(b.SendRaw(raw[:1], b.calls[0]))
	for _, c := range raw[1:] {
		b.must(b.SendRaw([]byte{c}))
	}
	b.must(b.RecvAck(SetVringCall))
	for _, c := range raw { // the ninth descriptor of the header's twelve is one too many, and ends the session
		if b.SendRaw([]byte{c}, b.calls[0]) != nil {
			break
		}
	}
	if err := b.end(); !errors.Is(err, ErrMalformed) {
		t.Errorf("session ended with %v, want %v", err, ErrMalformed)
	}
}

func TestDescriptorsThatCannotNotifyAreRefused(t *testing.T) {
	b := open(t, newFake(), nil)
	b.negotiate()
	null := openFile(t, "/dev/null")
	file := openFile(t, t.TempDir()+"/file")
	for _, fd := range []int{null, file, b.mem.FD} {
		b.refused(b.SetVringKick(0, fd))
		b.refused(b.SetVringCall(0, fd))
		b.refused(b.SetVringErr(0, fd))
	}
	for _, set := range []Request{SetVringKick, SetVringCall, SetVringErr} {
		b.refused(b.TellU64(set, 0))                         // says that one comes
		b.refused(b.TellU64(set, 0, b.kicks[0], b.kicks[1])) // one too many
	}
	b.must(b.SetVring(b.ring(0)))
	b.runs(0, true)
}

func TestSharedDescriptorsKeepTheirFlags(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	b.must(b.SetVringErr(0, eventfd(t)))
	for _, fd := range []int{b.kicks[0], b.calls[0]} {
		if flags, err := sys.FcntlGetfl(fd); err != nil || flags&sys.O_NONBLOCK != 0 {
			t.Errorf("flags %#x, %v: O_NONBLOCK was set on a descriptor of the front-end", flags, err)
		}
	}
}

// Descriptors that a message does not take are closed; the test's end counts them.
func TestDescriptorsThatNobodyTakesAreClosed(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	fds := []int{b.kicks[0], b.kicks[1], b.calls[0], b.mem.FD, b.kicks[0], b.kicks[0], b.kicks[0], b.kicks[0]}
	b.must(b.Send(GetFeatures, 0, nil, fds...))
	_, err := b.Recv(GetFeatures)
	b.must(err)
	b.must(b.Tell(RemMemReg, AppendMemReg(nil, b.mem.Region()), fds[0]))
	b.must(b.Send(GetFeatures, 0, nil, append(fds, fds[0])...)) // more than any message has: some are lost
	if err := b.end(); !errors.Is(err, ErrMalformed) {
		t.Errorf("session ended with %v, want %v", err, ErrMalformed)
	}
}

func TestFloodOfRefusedMessagesDoesNotFillTheLog(t *testing.T) {
	var out bytes.Buffer
	stats := new(Stats)
	b := open(t, newFake(), &ServerOptions{Logger: slog.New(slog.NewTextHandler(&out, nil)), Stats: stats})
	b.must(b.Negotiate(allFeatures, ProtocolOffered))
	for range 1000 {
		b.refused(b.Tell(9999, nil))
	}
	b.Close()
	b.must(b.end())
	if n := strings.Count(out.String(), "\n"); n == 0 || n > 40 {
		t.Errorf("%d lines in the log", n)
	}
	if stats.Refused.Load() != 1000 || stats.Sessions.Load() != 1 || stats.Broken.Load() != 0 || stats.Messages.Load() < 1000 {
		t.Errorf("counted %d refused, %d sessions, %d broken, %d messages", stats.Refused.Load(), stats.Sessions.Load(),
			stats.Broken.Load(), stats.Messages.Load())
	}
}
