// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func LoadAcquire16(p *uint16) uint16
TEXT ·LoadAcquire16(SB), NOSPLIT, $0-10
	MOVD  p+0(FP), R0
	LDARH (R0), R1
	MOVH  R1, ret+8(FP)
	RET

// func StoreRelease16(p *uint16, v uint16)
TEXT ·StoreRelease16(SB), NOSPLIT, $0-10
	MOVD  p+0(FP), R0
	MOVHU v+8(FP), R1
	STLRH R1, (R0)
	RET

// func Fence()
// DMB ISH: all accesses, the inner shareable domain, in which all CPUs that run processes are.
TEXT ·Fence(SB), NOSPLIT, $0-0
	DMB $0xb
	RET
