// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"fmt"
	"strings"
)

// SetupFlags are the IORING_SETUP_ flags that a ring was made with.
type SetupFlags uint32

// Set-up flags, with the kernel that brought each where that is later than 5.10.
const (
	SetupIOPoll           SetupFlags = 1 << 0
	SetupSQPoll           SetupFlags = 1 << 1
	SetupSQAff            SetupFlags = 1 << 2
	SetupCQSize           SetupFlags = 1 << 3
	SetupClamp            SetupFlags = 1 << 4
	SetupAttachWQ         SetupFlags = 1 << 5
	SetupRDisabled        SetupFlags = 1 << 6
	SetupSubmitAll        SetupFlags = 1 << 7  // 5.18
	SetupCoopTaskrun      SetupFlags = 1 << 8  // 5.19
	SetupTaskrunFlag      SetupFlags = 1 << 9  // 5.19
	SetupSQE128           SetupFlags = 1 << 10 // 5.19
	SetupCQE32            SetupFlags = 1 << 11 // 5.19
	SetupSingleIssuer     SetupFlags = 1 << 12 // 6.0
	SetupDeferTaskrun     SetupFlags = 1 << 13 // 6.1
	SetupNoMmap           SetupFlags = 1 << 14 // 6.5
	SetupRegisteredFdOnly SetupFlags = 1 << 15 // 6.5
	SetupNoSQArray        SetupFlags = 1 << 16 // 6.6
)

var setupNames = []string{"IOPOLL", "SQPOLL", "SQ_AFF", "CQSIZE", "CLAMP", "ATTACH_WQ", "R_DISABLED", "SUBMIT_ALL",
	"COOP_TASKRUN", "TASKRUN_FLAG", "SQE128", "CQE32", "SINGLE_ISSUER", "DEFER_TASKRUN", "NO_MMAP",
	"REGISTERED_FD_ONLY", "NO_SQARRAY"}

// String names the flags as the kernel does, without their prefix: "SINGLE_ISSUER|DEFER_TASKRUN".
func (f SetupFlags) String() string { return flagNames(uint32(f), setupNames) }

// Features are the IORING_FEAT_ bits that the kernel reported for a ring.
type Features uint32

// Feature bits, with the kernel that brought each where that is later than 5.10.
const (
	FeatSingleMmap     Features = 1 << 0
	FeatNoDrop         Features = 1 << 1 // completions that do not fit are kept, not lost
	FeatSubmitStable   Features = 1 << 2 // what an SQE names need not outlive its submission, data buffers apart
	FeatRWCurPos       Features = 1 << 3
	FeatCurPersonality Features = 1 << 4
	FeatFastPoll       Features = 1 << 5
	FeatPoll32Bits     Features = 1 << 6
	FeatSQPollNonfixed Features = 1 << 7  // 5.11
	FeatExtArg         Features = 1 << 8  // 5.11: io_uring_enter takes a time-out
	FeatNativeWorkers  Features = 1 << 9  // 5.12
	FeatRsrcTags       Features = 1 << 10 // 5.13
	FeatCQESkip        Features = 1 << 11 // 5.17
	FeatLinkedFile     Features = 1 << 12 // 5.17
	FeatRegRegRing     Features = 1 << 13 // 6.3
	FeatRecvSendBundle Features = 1 << 14 // 6.10
	FeatMinTimeout     Features = 1 << 15 // 6.12
	FeatRWAttr         Features = 1 << 16 // 6.14
	FeatNoIOWait       Features = 1 << 17 // 6.15
)

var featureNames = []string{"SINGLE_MMAP", "NODROP", "SUBMIT_STABLE", "RW_CUR_POS", "CUR_PERSONALITY", "FAST_POLL",
	"POLL_32BITS", "SQPOLL_NONFIXED", "EXT_ARG", "NATIVE_WORKERS", "RSRC_TAGS", "CQE_SKIP", "LINKED_FILE",
	"REG_REG_RING", "RECVSEND_BUNDLE", "MIN_TIMEOUT", "RW_ATTR", "NO_IOWAIT"}

// String names the features as the kernel does, without their prefix.
func (f Features) String() string { return flagNames(uint32(f), featureNames) }

// flagNames joins the names of the bits set in f; bits without a name are shown as a number at the end.
func flagNames(f uint32, names []string) string {
	var set []string
	for i, name := range names {
		if f&(1<<i) != 0 {
			set = append(set, name)
			f &^= 1 << i
		}
	}
	if f != 0 {
		set = append(set, fmt.Sprintf("%#x", f))
	}
	if len(set) == 0 {
		return "none"
	}
	return strings.Join(set, "|")
}
