// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"testing"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

func TestStructsLieInMemoryAsTheKernelHasThem(t *testing.T) {
	var (
		s  SQE
		c  CQE
		p  sys.IOUringParams
		so sys.IOSQRingOffsets
		co sys.IOCQRingOffsets
		ga sys.IOUringGeteventsArg
		u  sys.IOUringRsrcUpdate
		u2 sys.IOUringRsrcUpdate2
		pr Probe
		rs Restriction
	)
	for _, f := range []struct {
		name      string
		got, want uintptr
	}{
		{"sqe", unsafe.Sizeof(s), 64},
		{"sqe.opcode", unsafe.Offsetof(s.Opcode), 0},
		{"sqe.flags", unsafe.Offsetof(s.Flags), 1},
		{"sqe.ioprio", unsafe.Offsetof(s.IoPrio), 2},
		{"sqe.fd", unsafe.Offsetof(s.Fd), 4},
		{"sqe.off", unsafe.Offsetof(s.Off), 8},
		{"sqe.addr", unsafe.Offsetof(s.Addr), 16},
		{"sqe.len", unsafe.Offsetof(s.Len), 24},
		{"sqe.rw_flags", unsafe.Offsetof(s.OpFlags), 28},
		{"sqe.user_data", unsafe.Offsetof(s.UserData), 32},
		{"sqe.buf_index", unsafe.Offsetof(s.BufIndex), 40},
		{"sqe.personality", unsafe.Offsetof(s.Personality), 42},
		{"sqe.splice_fd_in", unsafe.Offsetof(s.SpliceFdIn), 44},
		{"sqe.addr3", unsafe.Offsetof(s.Addr3), 48},
		{"sqe.pad2", unsafe.Offsetof(s.Pad2), 56},
		{"cqe", unsafe.Sizeof(c), 16},
		{"cqe.user_data", unsafe.Offsetof(c.UserData), 0},
		{"cqe.res", unsafe.Offsetof(c.Res), 8},
		{"cqe.flags", unsafe.Offsetof(c.Flags), 12},
		{"params", unsafe.Sizeof(p), 120},
		{"params.features", unsafe.Offsetof(p.Features), 20},
		{"params.wq_fd", unsafe.Offsetof(p.WQFd), 24},
		{"params.sq_off", unsafe.Offsetof(p.SQOff), 40},
		{"params.cq_off", unsafe.Offsetof(p.CQOff), 80},
		{"sqring_offsets", unsafe.Sizeof(so), 40},
		{"sqring_offsets.array", unsafe.Offsetof(so.Array), 24},
		{"cqring_offsets", unsafe.Sizeof(co), 40},
		{"cqring_offsets.cqes", unsafe.Offsetof(co.CQEs), 20},
		{"getevents_arg", unsafe.Sizeof(ga), 24},
		{"getevents_arg.ts", unsafe.Offsetof(ga.TS), 16},
		{"rsrc_update", unsafe.Sizeof(u), 16},
		{"rsrc_update2", unsafe.Sizeof(u2), 32},
		{"rsrc_update2.nr", unsafe.Offsetof(u2.NR), 24},
		{"probe.ops", unsafe.Offsetof(pr.ops), 16},
		{"probe_op", unsafe.Sizeof(pr.ops[0]), 8},
		{"restriction", unsafe.Sizeof(rs), 16},
		{"restriction.sqe_op", unsafe.Offsetof(rs.arg), 2},
		{"timespec", unsafe.Sizeof(Timespec{}), 16},
		{"iovec", unsafe.Sizeof(IOVec{}), 16},
	} {
		if f.got != f.want {
			t.Errorf("%s: %d, the kernel's is %d", f.name, f.got, f.want)
		}
	}
}

func TestOperationsHaveTheKernelsNumbers(t *testing.T) {
	for _, o := range []struct {
		name      string
		got, want uint8
	}{
		{"POLL_ADD", IORING_OP_POLL_ADD, 6},
		{"TIMEOUT", IORING_OP_TIMEOUT, 11},
		{"ASYNC_CANCEL", IORING_OP_ASYNC_CANCEL, 14},
		{"FALLOCATE", IORING_OP_FALLOCATE, 17},
		{"READ", IORING_OP_READ, 22},
		{"SPLICE", IORING_OP_SPLICE, 30},
		{"MSG_RING", IORING_OP_MSG_RING, 40},
		{"URING_CMD", IORING_OP_URING_CMD, 46},
		{"FTRUNCATE", IORING_OP_FTRUNCATE, 55},
	} {
		if o.got != o.want {
			t.Errorf("%s is %d, want %d", o.name, o.got, o.want)
		}
	}
}

func TestPrepWritesTheWholeEntry(t *testing.T) {
	b := make([]byte, 100)
	v := []IOVec{IOVecOf(b), IOVecOf(b)}
	ts := &Timespec{Sec: 1}
	path := &b[0]
	at := func(p unsafe.Pointer) uint64 { return uint64(uintptr(p)) }
	ba, va, ta := at(unsafe.Pointer(&b[0])), at(unsafe.Pointer(&v[0])), at(unsafe.Pointer(ts))
	for _, c := range []struct {
		name string
		prep func(*SQE)
		want SQE
	}{
		{"nop", func(s *SQE) { s.PrepNop() }, SQE{Fd: -1}},
		{"read", func(s *SQE) { s.PrepRead(3, b, 8) }, SQE{Opcode: 22, Fd: 3, Off: 8, Addr: ba, Len: 100}},
		{"write", func(s *SQE) { s.PrepWrite(3, b, 8) }, SQE{Opcode: 23, Fd: 3, Off: 8, Addr: ba, Len: 100}},
		{"read nothing", func(s *SQE) { s.PrepRead(3, nil, 8) }, SQE{Opcode: 22, Fd: 3, Off: 8}},
		{"readv", func(s *SQE) { s.PrepReadv(3, v, 8, RWF_NOWAIT) }, SQE{Opcode: 1, Fd: 3, Off: 8, Addr: va, Len: 2, OpFlags: 8}},
		{"writev", func(s *SQE) { s.PrepWritev(3, v, 8, RWF_DSYNC) }, SQE{Opcode: 2, Fd: 3, Off: 8, Addr: va, Len: 2, OpFlags: 2}},
		{"read_fixed", func(s *SQE) { s.PrepReadFixed(3, b, 8, 5) }, SQE{Opcode: 4, Fd: 3, Off: 8, Addr: ba, Len: 100, BufIndex: 5}},
		{"write_fixed", func(s *SQE) { s.PrepWriteFixed(3, b, 8, 5) }, SQE{Opcode: 5, Fd: 3, Off: 8, Addr: ba, Len: 100, BufIndex: 5}},
		{"fsync", func(s *SQE) { s.PrepFsync(3, IORING_FSYNC_DATASYNC) }, SQE{Opcode: 3, Fd: 3, OpFlags: 1}},
		{"fallocate", func(s *SQE) { s.PrepFallocate(3, 2, 8, 1<<33) }, SQE{Opcode: 17, Fd: 3, Off: 8, Addr: 1 << 33, Len: 2}},
		{"ftruncate", func(s *SQE) { s.PrepFtruncate(3, 1<<33) }, SQE{Opcode: 55, Fd: 3, Off: 1 << 33}},
		{"sync_file_range", func(s *SQE) { s.PrepSyncFileRange(3, 8, 9, 4) }, SQE{Opcode: 8, Fd: 3, Off: 8, Len: 9, OpFlags: 4}},
		{"fadvise", func(s *SQE) { s.PrepFadvise(3, 8, 9, 4) }, SQE{Opcode: 24, Fd: 3, Off: 8, Len: 9, OpFlags: 4}},
		{"openat", func(s *SQE) { s.PrepOpenat(-100, path, 2, 0o600) }, SQE{Opcode: 18, Fd: -100, Addr: ba, Len: 0o600, OpFlags: 2}},
		{"close", func(s *SQE) { s.PrepClose(3) }, SQE{Opcode: 19, Fd: 3}},
		{"statx", func(s *SQE) { s.PrepStatx(-100, path, 1, 2, unsafe.Pointer(&v[0])) }, SQE{Opcode: 21, Fd: -100, Off: va, Addr: ba, Len: 2, OpFlags: 1}},
		{"splice", func(s *SQE) { s.PrepSplice(3, CurrentPosition, 4, 8, 9, 1) }, SQE{Opcode: 30, Fd: 4, Off: 8, Addr: ^uint64(0), Len: 9, OpFlags: 1, SpliceFdIn: 3}},
		{"poll_add", func(s *SQE) { s.PrepPollAdd(3, POLLIN, IORING_POLL_ADD_MULTI) }, SQE{Opcode: 6, Fd: 3, Len: 1, OpFlags: 1}},
		{"poll_remove", func(s *SQE) { s.PrepPollRemove(7) }, SQE{Opcode: 7, Fd: -1, Addr: 7}},
		{"poll_update", func(s *SQE) { s.PrepPollUpdate(7, 9, POLLOUT, 6) }, SQE{Opcode: 7, Fd: -1, Off: 9, Addr: 7, Len: 6, OpFlags: 4}},
		{"timeout", func(s *SQE) { s.PrepTimeout(ts, 3, IORING_TIMEOUT_ABS) }, SQE{Opcode: 11, Fd: -1, Off: 3, Addr: ta, Len: 1, OpFlags: 1}},
		{"timeout_remove", func(s *SQE) { s.PrepTimeoutRemove(7) }, SQE{Opcode: 12, Fd: -1, Addr: 7}},
		{"timeout_update", func(s *SQE) { s.PrepTimeoutUpdate(7, ts, 1) }, SQE{Opcode: 12, Fd: -1, Off: ta, Addr: 7, OpFlags: 3}},
		{"link_timeout", func(s *SQE) { s.PrepLinkTimeout(ts, 0) }, SQE{Opcode: 15, Fd: -1, Addr: ta, Len: 1}},
		{"cancel", func(s *SQE) { s.PrepCancel(7, IORING_ASYNC_CANCEL_ALL) }, SQE{Opcode: 14, Fd: -1, Addr: 7, OpFlags: 1}},
		{"cancel_fd", func(s *SQE) { s.PrepCancelFd(3, IORING_ASYNC_CANCEL_ALL) }, SQE{Opcode: 14, Fd: 3, OpFlags: 3}},
		{"send", func(s *SQE) { s.PrepSend(3, b, 1) }, SQE{Opcode: 26, Fd: 3, Addr: ba, Len: 100, OpFlags: 1}},
		{"recv", func(s *SQE) { s.PrepRecv(3, b, 1) }, SQE{Opcode: 27, Fd: 3, Addr: ba, Len: 100, OpFlags: 1}},
		{"sendmsg", func(s *SQE) { s.PrepSendmsg(3, nil, 1) }, SQE{Opcode: 9, Fd: 3, Len: 1, OpFlags: 1}},
		{"recvmsg", func(s *SQE) { s.PrepRecvmsg(3, nil, 1) }, SQE{Opcode: 10, Fd: 3, Len: 1, OpFlags: 1}},
		{"send_zc", func(s *SQE) { s.PrepSendZC(3, b, 1, 8) }, SQE{Opcode: 47, IoPrio: 8, Fd: 3, Addr: ba, Len: 100, OpFlags: 1}},
		{"accept", func(s *SQE) { s.PrepAccept(3, nil, nil, 1) }, SQE{Opcode: 13, Fd: 3, OpFlags: 1}},
		{"shutdown", func(s *SQE) { s.PrepShutdown(3, 1) }, SQE{Opcode: 34, Fd: 3, Len: 1}},
		{"msg_ring", func(s *SQE) { s.PrepMsgRing(3, 7, -5) }, SQE{Opcode: 40, Fd: 3, Off: 7, Len: 0xfffffffb}},
		{"uring_cmd", func(s *SQE) { s.PrepURingCmd(3, 0x1234, 1) }, SQE{Opcode: 46, Fd: 3, Off: 0x1234, OpFlags: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s SQE
			raw := (*[64]byte)(unsafe.Pointer(&s))
			for i := range raw {
				raw[i] = 0xa5
			}
			if c.prep(&s); s != c.want {
				t.Errorf("got  %+v\nwant %+v", s, c.want)
			}
		})
	}
}

func TestFlagsNameThemselves(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{SetupFlags(0).String(), "none"},
		{(SetupSingleIssuer | SetupDeferTaskrun).String(), "SINGLE_ISSUER|DEFER_TASKRUN"},
		{SetupNoSQArray.String(), "NO_SQARRAY"},
		{(SetupSQPoll | 1<<30).String(), "SQPOLL|0x40000000"},
		{(FeatExtArg | FeatNoIOWait).String(), "EXT_ARG|NO_IOWAIT"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}
