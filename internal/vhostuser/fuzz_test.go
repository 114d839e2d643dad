// SPDX-License-Identifier: Apache-2.0

package vhostuser_test

import (
	"context"
	"io"
	"os"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	. "github.com/sluice-blk/sluice/internal/vhostuser"
)

// A script is what FuzzSession reads as messages: request, flags, descriptors (number and kind), length of the payload,
// then the payload. Requests above scriptRaw are bytes that are sent as they are.
const scriptRaw = 0xf0

type scriptWriter []byte

func (s scriptWriter) message(r Request, flags byte, fds byte, payload []byte) scriptWriter {
	return append(append(s, byte(r), flags, fds, byte(len(payload))), payload...)
}

// fuzzMemory is where the script finds its memory: user and guest address of the region that its descriptors map.
const fuzzMemory = 0x10000

// goodScript brings a ring to life, so that the fuzzer starts from a conversation that works.
func goodScript() scriptWriter {
	region := guestmem.Region{GuestAddr: fuzzMemory, UserAddr: fuzzMemory, Size: 1 << 16}
	var s scriptWriter
	s = s.message(SetProtocolFeatures, 0, 0, AppendU64(nil, ProtocolOffered))
	s = s.message(SetFeatures, 8, 0, AppendU64(nil, FeatureVersion1|FeatureEventIdx|FeatureProtocolFeatures))
	s = s.message(SetMemTable, 8, 0x10, AppendMemTable(nil, []guestmem.Region{region}))
	s = s.message(SetVringNum, 8, 0, VringState{Num: 16}.Append(nil))
	s = s.message(SetVringBase, 8, 0, VringState{}.Append(nil))
	s = s.message(SetVringAddr, 8, 0, VringAddr{Desc: fuzzMemory, Avail: fuzzMemory + 4096, Used: fuzzMemory + 8192}.Append(nil))
	s = s.message(SetVringKick, 8, 0x11, AppendU64(nil, 0))
	s = s.message(SetVringCall, 8, 0x11, AppendU64(nil, 0))
	return s.message(SetVringEnable, 8, 0, VringState{Num: 1}.Append(nil))
}

// FuzzSession sends any messages, with descriptors of several kinds, to a session with a device that checks its
// contract. The session must end when the front-end leaves, with everything closed, and nothing may panic. What is
// covered depends on how goroutines meet, so fuzz with -fuzzminimizetime=1x, or most of the time goes into shrinking.
func FuzzSession(f *testing.F) {
	good := goodScript()
	f.Add([]byte(good))
	f.Add([]byte(good.message(GetVringBase, 0, 0, VringState{}.Append(nil)).message(SetVringKick, 0, 0x11, AppendU64(nil, 0))))
	f.Add([]byte(good.message(SetMemTable, 8, 0, AppendMemTable(nil, nil)).message(AddMemReg, 8, 0x10,
		AppendMemReg(nil, guestmem.Region{GuestAddr: fuzzMemory, UserAddr: fuzzMemory, Size: 1 << 16}))))
	f.Add([]byte(good.message(ResetDevice, 8, 0, nil).message(SetStatus, 8, 0, AppendU64(nil, 0))))
	f.Add([]byte(good.message(SetVringCall, 8, 0x11, AppendU64(nil, 0)).message(SetVringErr, 8, 0x21, AppendU64(nil, 0))))
	f.Add([]byte(good.message(SetVringKick, 8, 0x12, AppendU64(nil, 0)).message(GetConfig, 0, 0,
		ConfigSpace{Size: 4, Data: make([]byte, 4)}.Append(nil))))
	f.Add([]byte(scriptWriter(nil).message(scriptRaw, 0, 0x31, []byte{1, 0, 0, 0, 1, 0})))
	f.Add([]byte(good.message(99, 8, 0xf3, make([]byte, 200))))

	kinds := fuzzDescriptors(f)
	warm, back, err := vhosttest.Pair()
	if err != nil {
		f.Fatal(err)
	}
	_ = warm.Close()
	_ = back.Close()
	f.Fuzz(func(t *testing.T, script []byte) {
		before := descriptors(t)
		front, back, err := vhosttest.Pair()
		if err != nil {
			t.Fatal(err)
		}
		dev := newFake()
		done := make(chan error, 1)
		go func() { done <- ServeConn(context.Background(), back, dev, nil) }()
		read := make(chan struct{})
		go func() {
			_, _ = io.Copy(io.Discard, front.Conn())
			close(read)
		}()
		play(front, script, kinds)
		_ = front.Conn().CloseWrite()
		select {
		case <-done:
		case <-time.After(patience):
			t.Fatal("the session does not end")
		}
		<-read
		_ = front.Close()
		dev.verify(t)
		for kind, n := range descriptors(t) {
			if n > before[kind] {
				t.Errorf("%d descriptors of %s are open, %d were", n, kind, before[kind])
			}
		}
	})
}

// fuzzDescriptors are descriptors of the kinds that a script can send: memory, eventfd, device, socket.
func fuzzDescriptors(f *testing.F) [4]int {
	mem, err := vhosttest.NewMemory(0, 1<<16)
	if err != nil {
		f.Fatal(err)
	}
	event, err := sys.Eventfd(0, sys.EFD_CLOEXEC)
	if err != nil {
		f.Fatal(err)
	}
	a, b, err := sys.Socketpair()
	if err != nil {
		f.Fatal(err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		_, _ = mem.Close(), null.Close()
		for _, fd := range []int{event, a, b} {
			_ = sys.Close(fd)
		}
	})
	return [4]int{mem.FD, event, int(null.Fd()), a}
}

// play sends the script's messages until one cannot be sent.
func play(front *vhosttest.Frontend, script []byte, kinds [4]int) {
	for len(script) >= 4 {
		request, flags, what, n := script[0], script[1], script[2], int(script[3])
		script = script[4:]
		payload := script[:min(n, len(script))]
		script = script[len(payload):]
		fds := make([]int, what>>4)
		for i := range fds {
			fds[i] = kinds[what&3]
		}
		send := func() error { return front.Send(Request(request), uint32(flags), payload, fds...) }
		if request >= scriptRaw && len(payload) > 0 {
			send = func() error { return front.SendRaw(payload, fds...) }
		}
		if send() != nil {
			return
		}
	}
}
