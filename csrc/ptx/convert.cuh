// Conversions between fp32 and pairs of 16-bit elements, and approximations by the special-function
// unit.
#pragma once

#include <type_traits>

#include "ptx/elements.h"

namespace flash_dist {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Rounds {low, high} to nearest even and packs them into one register, low in the lower half.
template <class Target, class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  if constexpr (!Target::HAS_PACKED_CONVERT) {
    static_assert(std::is_same_v<T, Fp16>, "bf16 needs sm_80");
    asm("{\n .reg .f16 l, h;\n cvt.rn.f16.f32 l, %1;\n cvt.rn.f16.f32 h, %2;\n mov.b32 %0, {l, "
        "h};\n}"
        : "=r"(r)
        : "f"(low), "f"(high));
  } else if constexpr (std::is_same_v<T, Fp16>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  } else {
    float2 r;
    asm("{\n .reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
        : "=f"(r.x), "=f"(r.y)
        : "r"(x));
    return r;
  }
}

// Returns both elements of a register; negative ones become 0, NaN stays NaN. Requires sm_80.
template <class T>
__device__ __forceinline__ uint32_t relu(uint32_t x) {
  uint32_t r;
  if constexpr (std::is_same_v<T, Bf16>) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(0));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(0));
  }
  return r;
}

// 2 ** x; relative error 2 ** -22, -inf gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x); absolute error 2 ** -22 for x in [0.5, 2], else relative. 0 gives -inf.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x * y + z, clamped to [0, 1]; NaN gives 0.
__device__ __forceinline__ float fma_saturated(float x, float y, float z) {
  float r;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(y), "f"(z));
  return r;
}

// x << bits; 0 if bits >= 32.
__device__ __forceinline__ uint32_t shift_left(uint32_t x, int bits) {
  uint32_t r;
  asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(bits));
  return r;
}

// 1 / x; relative error 2 ** -23, inf gives 0.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash_dist
