// The gradient of a bias for 16-bit dtypes, see core/bias_gradient.cuh.
#pragma once

#include "core/bias_gradient.cuh"
#include "mma/fragments.cuh"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using BiasConfig =
    AnyBiasConfig<BiasPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Config>
struct BiasProducts {
  static constexpr int COLUMNS = Config::COLUMNS;

  // c += A @ B^T for the warp's rows of A, from row0 on, and all of B.
  template <int NT>
  __device__ __forceinline__ static void multiply(Accumulator<1, NT>& c, uint32_t a, int row0,
                                                  uint32_t b) {
    gemm_abt<typename Config::Target, typename Config::T, COLUMNS, COLUMNS / 16>(
        c, Operand<COLUMNS>::a(a + row0 * COLUMNS * 2), Operand<COLUMNS>::b(b), 0);
  }
};

template <class Config>
__device__ __forceinline__ void bias_block(const BiasGradientParams& p) {
  bias_gradient_block<Config, BiasProducts<Config>>(p);
}

}  // namespace flash_dist
