"""A source with a stub of every kind, for targets before sm_80, and kernels that resemble stubs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flash_dist.toolkit.gpucode.coverage import Verdict

SOURCE: Final = r"""
#include <cassert>
#include <cstdio>
#define WORK { float s = 0; int i = blockIdx.x * blockDim.x + threadIdx.x; \
  _Pragma("unroll") for (int j = 0; j < 64; ++j) s = fmaf(x[i + j * 128], s + j, __sinf(s)); \
  x[i] = s; }
#if __CUDA_ARCH__ >= 800
#define GUARDED(name, otherwise) extern "C" __global__ void name(float* x) WORK
#else
#define GUARDED(name, otherwise) extern "C" __global__ void name(float* x) { otherwise }
#endif
GUARDED(empty, )
GUARDED(prints, printf("FATAL: built for sm_75\n");)
GUARDED(prints_numbers, if (threadIdx.x == 0) printf("%d %p\n", int(blockIdx.x), x);)
GUARDED(asserts, assert(false);)
GUARDED(traps, __trap();)
GUARDED(asm_traps, asm volatile("trap;");)
GUARDED(prints_and_traps, printf("no\n"); __trap();)
GUARDED(tiny, x[threadIdx.x] = 0;)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
extern "C" __global__ void missing(float* x) WORK
#endif
extern "C" __global__ void legit_empty(float* x) {}
extern "C" __global__ void legit_tiny(float* x) { x[threadIdx.x] = 1; }
extern "C" __global__ void legit_assert(float* x) { assert(x); x[threadIdx.x] = 1; }
extern "C" __global__ void legit_check(float* x) { assert(x[threadIdx.x] != 0); }
extern "C" __global__ void legit_trap(int* x) { if (x[threadIdx.x]) __trap(); }
extern "C" __global__ void legit_large(float* x) WORK
extern "C" __global__ void legit_large_assert(float* x) { assert(x); WORK }
"""
COMPLAINTS: Final[dict[str, Verdict]] = {
    "prints": "stub:printf",
    "prints_numbers": "stub:printf",
    "asserts": "stub:assert",
    "traps": "stub:trap",
    "asm_traps": "stub:trap",
    "prints_and_traps": "stub:printf",
}
STUBS: Final[dict[str, Verdict]] = {**COMPLAINTS, "empty": "stub:empty", "tiny": "stub:tiny"}
