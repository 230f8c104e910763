// Single tiles through TMA and wgmma, for test_warpgroup_tile.py. The test compiles it with
// host/maps.cpp for sm_90a and one dtype: -DELEMENT=Bf16.
#include <type_traits>

#include "core/accumulator.cuh"
#include "core/maps.h"
#include "core/panels.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"

using namespace flash_dist;

using T = ELEMENT;
using Chip = Target<90, 'a', Code::SASS>;
constexpr Dtype DTYPE = std::is_same_v<T, Fp16> ? Dtype::FP16 : Dtype::BF16;
constexpr int M = 64;
constexpr int K = 128;
constexpr int LONGEST_N = 256;
constexpr int THREADS = 128;

// Where A is, and whether the rows of A and of B are k.
enum Mode {
  BY_ROWS,
  B_BY_COLUMNS,
  A_BY_COLUMNS,
  BOTH_BY_COLUMNS,
  REGISTERS,
  REGISTERS_B_BY_COLUMNS
};

template <int MODE>
constexpr bool ROWS_OF_A_ARE_K = MODE == A_BY_COLUMNS || MODE == BOTH_BY_COLUMNS;
template <int MODE>
constexpr bool ROWS_OF_B_ARE_K =
    MODE == B_BY_COLUMNS || MODE == BOTH_BY_COLUMNS || MODE == REGISTERS_B_BY_COLUMNS;

struct Maps {
  alignas(128) CUtensorMap a, b;
};

struct Smem {
  alignas(1024) uint8_t a[2 * K * 128], b[4 * LONGEST_N * 128];
  uint64_t full;
  __device__ Smem() = delete;
};

// Loads a tile of ROWS rows and `columns` columns.
template <int ROWS>
__device__ void load(uint32_t tile, const CUtensorMap& map, int columns, uint32_t barrier) {
  using Tile = Panels<ROWS>;
  mbarrier_expect(barrier, Tile::count(columns) * Tile::BYTES);
  for (int panel = 0; panel < Tile::count(columns); ++panel) {
    load_box(tile + panel * Tile::BYTES, map, {panel * Tile::COLUMNS, 0, 0, 0, 0}, barrier);
  }
}

// Returns an element of a tile.
template <int ROWS>
__device__ uint16_t element(const uint8_t* tile, int row, int column) {
  const uint8_t* at = tile + Panels<ROWS>::offset(row, column / 8) + column % 8 * 2;
  return *reinterpret_cast<const uint16_t*>(at);
}

// C[64, N] = A @ B.
template <int N, int MODE>
__global__ void __launch_bounds__(THREADS, 1)
    product(const __grid_constant__ Maps maps, float* c, bool twice) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  constexpr bool IN_REGISTERS = MODE == REGISTERS || MODE == REGISTERS_B_BY_COLUMNS;
  constexpr bool A_COLUMNS = ROWS_OF_A_ARE_K<MODE>, B_COLUMNS = ROWS_OF_B_ARE_K<MODE>;
  using ATile = Panels<A_COLUMNS ? K : M>;
  using BTile = Panels<B_COLUMNS ? K : N>;
  const uint32_t tile_a = shared_address(smem.a), tile_b = shared_address(smem.b);
  const uint32_t full = shared_address(&smem.full);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 2);
    mbarriers_made();
    load<A_COLUMNS ? K : M>(tile_a, maps.a, A_COLUMNS ? M : K, full);
    load<B_COLUMNS ? K : N>(tile_b, maps.b, B_COLUMNS ? N : K, full);
  }
  __syncthreads();
  mbarrier_wait(full, 0);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Accumulator<1, N / 8> d;
  d.clear();
  const uint64_t a = A_COLUMNS ? ATile::by_columns(tile_a) : ATile::by_rows(tile_a);
  const uint64_t b = B_COLUMNS ? BTile::by_columns(tile_b) : BTile::by_rows(tile_b);
  uint32_t fragments[K / 16][1][4];
  if constexpr (IN_REGISTERS) {
    for (int k = 0; k < K / 16; ++k)
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 16 + lane / 4 + i % 2 * 8;
        const int column = k * 16 + lane % 4 * 2 + i / 2 * 8;
        fragments[k][0][i] =
            element<M>(smem.a, row, column) | uint32_t{element<M>(smem.a, row, column + 1)} << 16;
      }
    hold(fragments);
  }
  for (int round = 0; round < (twice ? 2 : 1); ++round) {
    hold(d.x[0]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
      const uint64_t at_b = b + (B_COLUMNS ? BTile::columns_step(k) : BTile::rows_step(k));
      if constexpr (IN_REGISTERS) {
        wgmma<T, B_COLUMNS>(d.x[0], fragments[k][0], at_b);
      } else {
        wgmma<T, A_COLUMNS, B_COLUMNS>(
            d.x[0], a + (A_COLUMNS ? ATile::columns_step(k) : ATile::rows_step(k)), at_b);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(d.x[0]);
  }
  for (int n = 0; n < N / 8; ++n)
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + lane / 4 + i / 2 * 8;
      c[row * N + n * 8 + lane % 4 * 2 + i % 2] = d.x[0][n][i];
    }
}

template <class F>
bool launch(F* kernel, int blocks, void** arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(THREADS), arguments,
                   sizeof(Smem), nullptr);
  return cudaDeviceSynchronize() == cudaSuccess;
}

template <int N, int MODE>
bool run(const View& a, const View& b, float* c, bool twice) {
  constexpr bool A_COLUMNS = ROWS_OF_A_ARE_K<MODE>, B_COLUMNS = ROWS_OF_B_ARE_K<MODE>;
  const int rows_a = A_COLUMNS ? K : M, rows_b = B_COLUMNS ? K : N;
  Maps maps;
  AxisSteps steps;
  const Axes axes{1, 1, 1};
  if (make_map(&maps.a, &steps, a, DTYPE, rows_a, A_COLUMNS ? M : K, axes, rows_a) ||
      make_map(&maps.b, &steps, b, DTYPE, rows_b, B_COLUMNS ? N : K, axes, rows_b)) {
    return false;
  }
  void* arguments[] = {&maps, &c, &twice};
  return launch(product<N, MODE>, 1, arguments);
}

template <int N>
bool run_mode(int mode, const View& a, const View& b, float* c, bool twice) {
  switch (mode) {
    case BY_ROWS:
      return run<N, BY_ROWS>(a, b, c, twice);
    case B_BY_COLUMNS:
      return run<N, B_BY_COLUMNS>(a, b, c, twice);
    case A_BY_COLUMNS:
      return run<N, A_BY_COLUMNS>(a, b, c, twice);
    case BOTH_BY_COLUMNS:
      return run<N, BOTH_BY_COLUMNS>(a, b, c, twice);
    case REGISTERS:
      return run<N, REGISTERS>(a, b, c, twice);
    case REGISTERS_B_BY_COLUMNS:
      return run<N, REGISTERS_B_BY_COLUMNS>(a, b, c, twice);
  }
  return false;
}

// Returns true if the kernel ran. The rows of a and b are row_stride elements apart.
extern "C" bool run_product(int n, int mode, void* a, void* b, int64_t row_stride, float* c,
                            bool twice) {
  const View view_a{a, 0, row_stride, 0, 0}, view_b{b, 0, row_stride, 0, 0};
  switch (n) {
    case 64:
      return run_mode<64>(mode, view_a, view_b, c, twice);
    case 80:
      return run_mode<80>(mode, view_a, view_b, c, twice);
    case 96:
      return run_mode<96>(mode, view_a, view_b, c, twice);
    case 112:
      return run_mode<112>(mode, view_a, view_b, c, twice);
    case 128:
      return run_mode<128>(mode, view_a, view_b, c, twice);
    case 192:
      return run_mode<192>(mode, view_a, view_b, c, twice);
    case 256:
      return run_mode<256>(mode, view_a, view_b, c, twice);
  }
  return false;
}

struct CopyParams {
  Maps maps;
  AxisSteps steps;
  Axes axes;
  int row_tiles, panels;
};

// Copies one box of 64 rows and 64 columns between two tensors.
__global__ void copy(const __grid_constant__ CopyParams p) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  if (threadIdx.x != 0) return;
  int i = blockIdx.x;
  const auto next = [&](int size) {
    const int at = i % size;
    i /= size;
    return at;
  };
  const int column = next(p.panels) * 64, row = next(p.row_tiles) * 64;
  const int member = next(p.axes.members), head_kv = next(p.axes.heads_kv), batch = i;
  const uint32_t full = shared_address(&smem.full);
  mbarrier_init(full, 1);
  mbarriers_made();
  mbarrier_expect(full, 64 * 128);
  load_box(shared_address(smem.a), p.maps.a,
           {column, row, member * p.steps.member, head_kv * p.steps.head_kv, batch * p.steps.batch},
           full);
  mbarrier_wait(full, 0);
  store_box(p.maps.b, {column, row, member, head_kv, batch}, shared_address(smem.a));
  commit_stores();
  wait_until_read<0>();
}

// Copies a [batches, rows, heads_kv, members, columns] view. Returns null, or why it has no map.
extern "C" const char* run_copy(void* from, void* to, const int64_t* strides_from,
                                const int64_t* strides_to, int batches, int rows, int heads_kv,
                                int members, int columns) {
  const auto view = [](void* data, const int64_t* s) { return View{data, s[0], s[1], s[2], s[3]}; };
  const View a = view(from, strides_from), b = view(to, strides_to);
  CopyParams p;
  p.axes = {members, heads_kv, batches};
  for (const View* one : {&a, &b}) {
    if (const char* problem = find_map_problem(*one, rows, columns, p.axes)) return problem;
  }
  AxisSteps to_steps;
  if (make_map(&p.maps.a, &p.steps, a, DTYPE, rows, columns, p.axes, 64) ||
      make_map(&p.maps.b, &to_steps, b, DTYPE, rows, columns, p.axes, 64)) {
    return "no map could be made";
  }
  p.row_tiles = (rows + 63) / 64;
  p.panels = (columns + 63) / 64;
  void* arguments[] = {&p};
  const int blocks = p.row_tiles * p.panels * members * heads_kv * batches;
  return launch(copy, blocks, arguments) ? nullptr : "the copy failed";
}
