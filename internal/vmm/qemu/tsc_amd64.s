#include "textflag.h"

// func readTSC() uint64
// LFENCE keeps the processor from reading the counter before what precedes it has been done.
TEXT ·readTSC(SB), NOSPLIT, $0-8
	LFENCE
	RDTSC
	SHLQ	$32, DX
	ORQ	DX, AX
	MOVQ	AX, ret+0(FP)
	RET
