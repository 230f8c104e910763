// fp32 matrix product of the kernels that read a long head_dim in steps of COLUMNS columns.
#pragma once

#include "f32/product.cuh"

namespace flash_dist {

template <class Config>
struct F32ColumnProducts {
  static constexpr int COLUMNS = Config::COLUMNS;

  // c += A @ B^T over one step of columns, for the warp's rows of A, from row0 on, and all rows of
  // B. Sums the columns of the step separately before adding them to c, as all kernels do for S.
  template <int MT, int NT>
  __device__ __forceinline__ static void multiply(Accumulator<MT, NT>& c, uint32_t a, int row0,
                                                  uint32_t b) {
    using Rows = FloatRows<COLUMNS>;
    Accumulator<MT, NT> sum;
    sum.clear();
    Product<typename Config::Target, typename Config::T>::template abt<COLUMNS, COLUMNS, 2,
                                                                       Queries::A>(
        sum, Rows::at(a, row0, 0), b);
    c.add(sum);
  }
};

}  // namespace flash_dist
