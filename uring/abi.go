// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

// Operations, under the kernel's names (enum io_uring_op). The number is the interface. A comment gives the kernel that
// brought one, where that is later than 5.10.
const (
	IORING_OP_NOP uint8 = iota
	IORING_OP_READV
	IORING_OP_WRITEV
	IORING_OP_FSYNC
	IORING_OP_READ_FIXED
	IORING_OP_WRITE_FIXED
	IORING_OP_POLL_ADD
	IORING_OP_POLL_REMOVE
	IORING_OP_SYNC_FILE_RANGE
	IORING_OP_SENDMSG
	IORING_OP_RECVMSG
	IORING_OP_TIMEOUT
	IORING_OP_TIMEOUT_REMOVE
	IORING_OP_ACCEPT
	IORING_OP_ASYNC_CANCEL
	IORING_OP_LINK_TIMEOUT
	IORING_OP_CONNECT
	IORING_OP_FALLOCATE
	IORING_OP_OPENAT
	IORING_OP_CLOSE
	IORING_OP_FILES_UPDATE
	IORING_OP_STATX
	IORING_OP_READ
	IORING_OP_WRITE
	IORING_OP_FADVISE
	IORING_OP_MADVISE
	IORING_OP_SEND
	IORING_OP_RECV
	IORING_OP_OPENAT2
	IORING_OP_EPOLL_CTL
	IORING_OP_SPLICE
	IORING_OP_PROVIDE_BUFFERS
	IORING_OP_REMOVE_BUFFERS
	IORING_OP_TEE
	IORING_OP_SHUTDOWN         // 5.11
	IORING_OP_RENAMEAT         // 5.11
	IORING_OP_UNLINKAT         // 5.11
	IORING_OP_MKDIRAT          // 5.15
	IORING_OP_SYMLINKAT        // 5.15
	IORING_OP_LINKAT           // 5.15
	IORING_OP_MSG_RING         // 5.18
	IORING_OP_FSETXATTR        // 5.19
	IORING_OP_SETXATTR         // 5.19
	IORING_OP_FGETXATTR        // 5.19
	IORING_OP_GETXATTR         // 5.19
	IORING_OP_SOCKET           // 5.19
	IORING_OP_URING_CMD        // 5.19
	IORING_OP_SEND_ZC          // 6.0
	IORING_OP_SENDMSG_ZC       // 6.1
	IORING_OP_READ_MULTISHOT   // 6.7
	IORING_OP_WAITID           // 6.7
	IORING_OP_FUTEX_WAIT       // 6.7
	IORING_OP_FUTEX_WAKE       // 6.7
	IORING_OP_FUTEX_WAITV      // 6.7
	IORING_OP_FIXED_FD_INSTALL // 6.8
	IORING_OP_FTRUNCATE        // 6.9
)

// Flags of an [SQE], for [SQE.AddFlags].
const (
	IOSQE_FIXED_FILE       uint8 = 1 << 0 // Fd is an index into the registered files
	IOSQE_IO_DRAIN         uint8 = 1 << 1 // start when everything submitted before is complete
	IOSQE_IO_LINK          uint8 = 1 << 2 // the next entry starts when this one has succeeded
	IOSQE_IO_HARDLINK      uint8 = 1 << 3 // the next entry starts when this one is complete, whatever its result
	IOSQE_ASYNC            uint8 = 1 << 4 // straight to a kernel worker, no attempt to do it at once
	IOSQE_BUFFER_SELECT    uint8 = 1 << 5 // the kernel picks a buffer of group BufIndex
	IOSQE_CQE_SKIP_SUCCESS uint8 = 1 << 6 // no CQE on success (5.17, FeatCQESkip)
)

// Flags of a [CQE].
const (
	IORING_CQE_F_BUFFER        uint32 = 1 << 0 // the upper 16 bits are the buffer's id
	IORING_CQE_F_MORE          uint32 = 1 << 1 // more CQEs will come of the same SQE
	IORING_CQE_F_SOCK_NONEMPTY uint32 = 1 << 2 // the socket has more to read
	IORING_CQE_F_NOTIF         uint32 = 1 << 3 // the buffer of a SEND_ZC is free again
)

// Command flags of the single operations.
const (
	IORING_FSYNC_DATASYNC uint32 = 1 << 0

	IORING_TIMEOUT_ABS           uint32 = 1 << 0
	IORING_TIMEOUT_UPDATE        uint32 = 1 << 1
	IORING_TIMEOUT_BOOTTIME      uint32 = 1 << 2 // 5.15
	IORING_TIMEOUT_REALTIME      uint32 = 1 << 3 // 5.15
	IORING_LINK_TIMEOUT_UPDATE   uint32 = 1 << 4 // 5.15
	IORING_TIMEOUT_ETIME_SUCCESS uint32 = 1 << 5 // 5.16
	IORING_TIMEOUT_MULTISHOT     uint32 = 1 << 6 // 6.4

	IORING_POLL_ADD_MULTI        uint32 = 1 << 0 // 5.13
	IORING_POLL_UPDATE_EVENTS    uint32 = 1 << 1 // 5.13
	IORING_POLL_UPDATE_USER_DATA uint32 = 1 << 2 // 5.13

	IORING_ASYNC_CANCEL_ALL      uint32 = 1 << 0 // 5.19
	IORING_ASYNC_CANCEL_FD       uint32 = 1 << 1 // 5.19
	IORING_ASYNC_CANCEL_ANY      uint32 = 1 << 2 // 5.19
	IORING_ASYNC_CANCEL_FD_FIXED uint32 = 1 << 3 // 6.0

	IORING_RECVSEND_POLL_FIRST  uint16 = 1 << 0 // 5.19
	IORING_RECV_MULTISHOT       uint16 = 1 << 1 // 6.0
	IORING_RECVSEND_FIXED_BUF   uint16 = 1 << 2 // 6.0
	IORING_SEND_ZC_REPORT_USAGE uint16 = 1 << 3 // 6.2
	IORING_ACCEPT_MULTISHOT     uint16 = 1 << 0 // 5.19

	IORING_MSG_DATA    = 0
	IORING_MSG_SEND_FD = 1 // 6.0

	IORING_URING_CMD_FIXED uint32 = 1 << 0 // 6.1
)

// Flags of one read or write (preadv2(2)), for [SQE.PrepReadv] and [SQE.PrepWritev].
const (
	RWF_DSYNC  uint32 = 0x02 // the write is durable when it completes
	RWF_SYNC   uint32 = 0x04
	RWF_NOWAIT uint32 = 0x08
	RWF_APPEND uint32 = 0x10
)

// Events of [SQE.PrepPollAdd] (poll(2)).
const (
	POLLIN    uint32 = 0x001
	POLLPRI   uint32 = 0x002
	POLLOUT   uint32 = 0x004
	POLLERR   uint32 = 0x008
	POLLHUP   uint32 = 0x010
	POLLNVAL  uint32 = 0x020
	POLLRDHUP uint32 = 0x2000
)

// Flags of io_uring_enter(2), as an [EnterFunc] sees them.
const (
	IORING_ENTER_GETEVENTS       uint32 = 1 << 0
	IORING_ENTER_SQ_WAKEUP       uint32 = 1 << 1
	IORING_ENTER_SQ_WAIT         uint32 = 1 << 2
	IORING_ENTER_EXT_ARG         uint32 = 1 << 3
	IORING_ENTER_REGISTERED_RING uint32 = 1 << 4
)

// Bits of the submission queue's flags word; the kernel writes, the ring reads.
const (
	sqNeedWakeup = 1 << 0
	sqCQOverflow = 1 << 1
	sqTaskrun    = 1 << 2
)
