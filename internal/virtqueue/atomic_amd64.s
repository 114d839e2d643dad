// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func LoadAcquire16(p *uint16) uint16
// Loads are not moved before loads, nor stores before loads, on this architecture: a plain load acquires.
TEXT ·LoadAcquire16(SB), NOSPLIT, $0-10
	MOVQ    p+0(FP), AX
	MOVWLZX (AX), AX
	MOVW    AX, ret+8(FP)
	RET

// func StoreRelease16(p *uint16, v uint16)
// Stores stay behind all loads and stores before them: a plain store releases.
TEXT ·StoreRelease16(SB), NOSPLIT, $0-10
	MOVQ p+0(FP), AX
	MOVW v+8(FP), BX
	MOVW BX, (AX)
	RET

// func Fence()
// A locked instruction on the own stack: as strong as MFENCE for ordinary memory, and quicker.
TEXT ·Fence(SB), NOSPLIT, $8-0
	LOCK
	ADDL $0, 0(SP)
	RET
