// csrc/ptx/wgmma.cuh in the emulator, which computes a product at once. Operands in shared memory
// have the layout of the PTX ISA, "Matrix Descriptor", with 128-byte swizzle.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.h"
#include "ptx/convert.cuh"
#include "ptx/elements.h"

namespace flash_dist {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
void wgmma_wait() {}
template <class Registers>
void hold(Registers&) {}

// Returns element (row, k) of an operand; row counts along M or N. TRANSPOSED: a row in memory
// holds one k.
template <class T, bool TRANSPOSED>
float descriptor_element(uint64_t descriptor, int row, int k) {
  if (descriptor >> 62 != 1) emulator::fail("an operand has another swizzle than 128 bytes");
  const auto field = [=](int from) {
    return static_cast<uint32_t>(descriptor >> from & 0x3fff) << 4;
  };
  const int line = TRANSPOSED ? k : row, column = TRANSPOSED ? row : k;
  uint32_t at = field(0) + line / 8 * field(32) + line % 8 * 128 + column % 64 * 2;
  if (TRANSPOSED) at += column / 64 * field(16);
  at ^= (at >> 7 & 7) << 4;
  uint16_t bits;
  std::memcpy(&bits, emulator::read_shared(at & ~3u, 4, true) + at % 4, 2);
  return unpack<T>(bits).x;
}

template <int NT>
struct WgmmaOperands {
  float d[NT][4];
  uint32_t a[4];
  uint64_t a_tile, b;
};
template <int NT>
struct WgmmaResult {
  float d[NT][4];
};

template <class T, bool A_IN_REGISTERS, bool TRANSPOSED_A, bool TRANSPOSED_B, bool FIRST, int NT>
void multiply_warpgroup(const WgmmaOperands<NT> (&in)[128], WgmmaResult<NT> (&out)[128]) {
  static float a[64][16], b[16][NT * 8], d[64][NT * 8];
  const auto place = [](int thread, int i) {
    return thread / 32 * 16 + thread % 32 / 4 + i / 2 * 8;
  };
  for (int thread = 0; thread < 128; ++thread) {
    const int t = thread % 4 * 2;
    for (int n = 0; n < NT; ++n)
      for (int i = 0; i < 4; ++i) {
        d[place(thread, i)][n * 8 + t + i % 2] = FIRST ? 0.0f : in[thread].d[n][i];
      }
    for (int i = 0; A_IN_REGISTERS && i < 4; ++i) {
      const float2 x = unpack<T>(in[thread].a[i]);
      float* row = a[place(thread, i % 2 * 2)];
      row[t + i / 2 * 8] = x.x;
      row[t + i / 2 * 8 + 1] = x.y;
    }
    const bool same =
        in[thread].b == in[0].b && (A_IN_REGISTERS || in[thread].a_tile == in[0].a_tile);
    if (!same) emulator::fail("threads of a warpgroup have different descriptors");
  }
  for (int row = 0; !A_IN_REGISTERS && row < 64; ++row)
    for (int k = 0; k < 16; ++k)
      a[row][k] = descriptor_element<T, TRANSPOSED_A>(in[0].a_tile, row, k);
  for (int n = 0; n < NT * 8; ++n)
    for (int k = 0; k < 16; ++k) b[k][n] = descriptor_element<T, TRANSPOSED_B>(in[0].b, n, k);
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < NT * 8; ++n) d[row][n] += a[row][k] * b[k][n];
  for (int thread = 0; thread < 128; ++thread)
    for (int n = 0; n < NT; ++n)
      for (int i = 0; i < 4; ++i) {
        out[thread].d[n][i] = d[place(thread, i)][n * 8 + thread % 4 * 2 + i % 2];
      }
}

template <class T, bool A_IN_REGISTERS, bool TRANSPOSED_A, bool TRANSPOSED_B, bool FIRST, int NT>
void multiply_together(float (&d)[NT][4], WgmmaOperands<NT>& in) {
  std::memcpy(in.d, d, sizeof d);
  const auto out = emulator::together<WgmmaResult<NT>, emulator::WARPGROUP>(
      emulator::WGMMA, in,
      multiply_warpgroup<T, A_IN_REGISTERS, TRANSPOSED_A, TRANSPOSED_B, FIRST, NT>);
  std::memcpy(d, out.d, sizeof d);
}

template <class T, bool TRANSPOSED_A, bool TRANSPOSED_B, bool FIRST = false, int NT>
void wgmma(float (&d)[NT][4], uint64_t a, uint64_t b) {
  WgmmaOperands<NT> in{};
  in.a_tile = a;
  in.b = b;
  multiply_together<T, false, TRANSPOSED_A, TRANSPOSED_B, FIRST>(d, in);
}

template <class T, bool TRANSPOSED_B, bool FIRST = false, int NT>
void wgmma(float (&d)[NT][4], const uint32_t (&a)[4], uint64_t b) {
  WgmmaOperands<NT> in{};
  std::memcpy(in.a, a, sizeof a);
  in.b = b;
  multiply_together<T, true, false, TRANSPOSED_B, FIRST>(d, in);
}

}  // namespace flash_dist
