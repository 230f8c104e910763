// csrc/ptx/ldmatrix.cuh in the emulator: four tiles of 8 rows, with addresses from lanes 8 * i to 8
// * i + 7.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.h"

namespace flash_dist {

struct MatrixRegisters {
  uint32_t r[4];
};

template <bool TRANSPOSED>
void load_matrices(uint32_t (&r)[4], uint32_t smem) {
  constexpr auto OPERATION = TRANSPOSED ? emulator::LDMATRIX_TRANS : emulator::LDMATRIX;
  const auto loaded = emulator::together<MatrixRegisters>(
      OPERATION, smem, [](const uint32_t (&rows)[32], MatrixRegisters(&out)[32]) {
        for (int i = 0; i < 4; ++i) {
          uint32_t addresses[8];
          uint16_t tile[8][8];
          for (int row = 0; row < 8; ++row) {
            addresses[row] = rows[8 * i + row];
            std::memcpy(tile[row], emulator::read_shared(addresses[row], 16), 16);
          }
          emulator::count_conflicts(addresses);
          for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4 * 2;
            const uint16_t low = TRANSPOSED ? tile[t][g] : tile[g][t];
            const uint16_t high = TRANSPOSED ? tile[t + 1][g] : tile[g][t + 1];
            out[lane].r[i] = low | static_cast<uint32_t>(high) << 16;
          }
        }
      });
  std::memcpy(r, loaded.r, sizeof r);
}

struct StoredMatrices {
  uint32_t smem, r[4];
};

inline void stmatrix_x4(uint32_t smem, const uint32_t (&r)[4]) {
  StoredMatrices in{smem, {r[0], r[1], r[2], r[3]}};
  emulator::together<int>(emulator::STMATRIX, in,
                          [](const StoredMatrices(&all)[32], int (&done)[32]) {
                            for (int i = 0; i < 4; ++i)
                              for (int row = 0; row < 8; ++row) {
                                uint8_t* to = emulator::write_shared(all[8 * i + row].smem, 16);
                                for (int t = 0; t < 4; ++t)
                                  std::memcpy(to + 4 * t, &all[row * 4 + t].r[i], 4);
                              }
                            for (int& one : done) one = 0;
                          });
}

inline uint32_t movmatrix_trans(uint32_t x) {
  return emulator::together<uint32_t>(
      emulator::MOVMATRIX, x, [](const uint32_t (&in)[32], uint32_t (&out)[32]) {
        const auto element = [&](int row, int column) {
          return in[row * 4 + column / 2] >> column % 2 * 16 & 0xffff;
        };
        for (int lane = 0; lane < 32; ++lane) {
          const int row = lane / 4, column = lane % 4 * 2;
          out[lane] = element(column, row) | element(column + 1, row) << 16;
        }
      });
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) { load_matrices<false>(r, smem); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) { load_matrices<true>(r, smem); }

}  // namespace flash_dist
