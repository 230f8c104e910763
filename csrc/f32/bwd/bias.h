// The gradient of a bias in fp32, see core/bias_gradient.cuh.
#pragma once

#include "core/bias_gradient.cuh"
#include "f32/product.cuh"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32BiasConfig =
    AnyBiasConfig<F32BiasPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32BiasConfig = AnyBiasConfig<Ieee32BiasPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                       HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Config>
struct F32BiasProducts {
  static constexpr int COLUMNS = Config::COLUMNS;

  // c += A @ B^T for the warp's rows of A, from row0 on, and all of B. Sums each block of columns
  // separately, as all kernels sum scores.
  template <int NT>
  __device__ __forceinline__ static void multiply(Accumulator<1, NT>& c, uint32_t a, int row0,
                                                  uint32_t b) {
    using Rows = FloatRows<COLUMNS>;
    Accumulator<1, NT> sum;
    sum.clear();
    Product<typename Config::Target, typename Config::T>::template abt<COLUMNS, COLUMNS, 2,
                                                                       Queries::A>(
        sum, Rows::at(a, row0, 0), b);
    c.add(sum);
  }
};

template <class Config>
__device__ __forceinline__ void f32_bias_block(const BiasGradientParams& p) {
  bias_gradient_block<Config, F32BiasProducts<Config>>(p);
}

}  // namespace flash_dist
