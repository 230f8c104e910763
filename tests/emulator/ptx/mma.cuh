// csrc/ptx/mma.cuh in the emulator, with fragments as in the PTX ISA, "Matrix Fragments for
// mma.m16n8k16 with floating point type".
#pragma once

#include <cstring>

#include "block.h"
#include "ptx/convert.cuh"
#include "ptx/elements.h"

namespace flash_dist {

struct MmaOperands {
  float d[4];
  uint32_t a[4], b[2];
};
struct MmaResult {
  float d[4];
};

template <class T>
void multiply_tiles(const MmaOperands (&in)[32], MmaResult (&out)[32]) {
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<T>(in[lane].a[i]);
      a[g + i % 2 * 8][t + i / 2 * 8] = x.x;
      a[g + i % 2 * 8][t + i / 2 * 8 + 1] = x.y;
      d[g + i / 2 * 8][t + i % 2] = in[lane].d[i];
    }
    for (int i = 0; i < 2; ++i) {
      const float2 x = unpack<T>(in[lane].b[i]);
      b[t + i * 8][g] = x.x;
      b[t + i * 8 + 1][g] = x.y;
    }
  }
  for (auto& row : d) {
    const auto& a_row = a[&row - d];
    for (int n = 0; n < 8; ++n)
      for (int k = 0; k < 16; ++k) row[n] += a_row[k] * b[k][n];
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) out[lane].d[i] = d[g + i / 2 * 8][t + i % 2];
  }
}

template <class Target, class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaOperands in;
  std::memcpy(in.d, d, sizeof d);
  std::memcpy(in.a, a, sizeof a);
  in.b[0] = b0, in.b[1] = b1;
  const auto out = emulator::together<MmaResult>(emulator::MMA, in, multiply_tiles<T>);
  std::memcpy(d, out.d, sizeof d);
}

}  // namespace flash_dist
