// Matrix instructions of one warp: D = A @ B + D, fp32 accumulators.
//
// Fragment layout of m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane = 4 * g + t:
//   a[0] row g     cols 2t, 2t+1     a[2] row g     cols 2t+8, 2t+9
//   a[1] row g + 8 cols 2t, 2t+1     a[3] row g + 8 cols 2t+8, 2t+9
//   b[0] rows 2t, 2t+1  col g        b[1] rows 2t+8, 2t+9  col g
//   d[0], d[1] row g  cols 2t, 2t+1  d[2], d[3] row g + 8
#pragma once

#include <type_traits>

#include <cstdint>
#include "ptx/elements.h"

namespace flash_dist {

// D[16, 8] += A[16, 16] @ B[16, 8]
template <class Target, class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (!Target::HAS_MMA_K16) {
    static_assert(std::is_same_v<T, Fp16>, "mma.sync has no bf16 before sm_80");
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, "
        "%1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, "
        "%1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
  } else if constexpr (std::is_same_v<T, Fp16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Fragment layout of m16n8k8 (PTX ISA, "Matrix Fragments for mma.m16n8k8", .tf32), lane = 4g + t:
//   a[0] row g      col t      a[2] row g      col t + 4
//   a[1] row g + 8  col t      a[3] row g + 8  col t + 4
//   b[0] row t      col g      b[1] row t + 4  col g
//   d[0], d[1] row g  cols 2t, 2t+1  d[2], d[3] row g + 8

// Splits x = high + low. A tf32 operand has 11 significant bits; the hardware ignores the rest of
// the register. high is x rounded to 11 bits. low then has 12 bits with either sign, and loses at
// most one bit. If high were truncated instead, low would have 13 bits and the sign of x, and the
// errors of products would add up. For |x| from 2^128 - 2^116 on, high is infinite and the products
// become NaN.
__device__ __forceinline__ void split_tf32(uint32_t& high, uint32_t& low, uint32_t x) {
  high = (x + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}

// D[16, 8] += A[16, 8] @ B[8, 8]; sm_80 and newer.
//
// NOTE: each instruction truncates the sum instead of rounding it.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// D[16, 8] = A[16, 8] @ B[8, 8].
__device__ __forceinline__ void mma_m16n8k8_tf32_first(float (&d)[4], const uint32_t (&a)[4],
                                                       const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

}  // namespace flash_dist
