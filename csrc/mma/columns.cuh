// A matrix product of 16-bit elements over COLUMNS columns of a long head_dim.
#pragma once

#include "mma/fragments.cuh"

namespace flash_dist {

template <class Config>
struct ColumnProducts {
  static constexpr int COLUMNS = Config::COLUMNS;

  // c += A @ B^T for the warp's rows of A, from row0 on, and all of B.
  template <int MT, int NT>
  __device__ __forceinline__ static void multiply(Accumulator<MT, NT>& c, uint32_t a, int row0,
                                                  uint32_t b) {
    gemm_abt<typename Config::Target, typename Config::T, COLUMNS, COLUMNS / 16>(
        c, Operand<COLUMNS>::a(a + row0 * COLUMNS * 2), Operand<COLUMNS>::b(b), 0);
  }
};

}  // namespace flash_dist
