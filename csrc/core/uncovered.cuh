// Uncovered rows: rows of packed tensors outside every document. They are before the first
// document, after the last, or in a document beyond max_seqlen. No block computes them, and outputs
// are allocated uninitialised. So out and the gradients are set to 0 there, and lse to -inf.
//
// Blocks of existing kernels do this before their own work. Forward and decode kernels write out
// and lse. The delta kernel, or the backward for short sequences, writes dq, dk and dv.
// The delta kernel is launched once and first, and has registers to spare. If every row is covered,
// a block spends only a comparison and one more load from cu_seqlens, which runs at the same time
// as the other loads.
#pragma once

#include "core/blocks.cuh"
#include "core/sequence.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

constexpr int ROW_LANES = 8;  // threads per row, 16 bytes each: a 128-byte line

// Calls f(row) in ROW_LANES adjacent threads for each of this block's uncovered rows. THREADS
// threads of the block take part, from thread FIRST on. The `blocks` blocks of document `number`
// fill the rows next to it. Many rows may follow the last document: the blocks of all documents
// share them.
template <int THREADS, int FIRST = 0, class F>
__device__ __forceinline__ void for_uncovered_rows(const int* cu_seqlens, int number, int documents,
                                                   int total, int longest, int block, int blocks,
                                                   F f) {
  const DocumentRows own(cu_seqlens, number, documents, total, longest);
#pragma unroll 1
  for (int part = 0; part < 3; ++part) {
    const bool behind_all = part == 2;
    const int before = number == 0 ? own.begin : 0;
    const int last = DocumentRows::last_end(cu_seqlens, documents, total);
    const int begin = part == 0 ? 0 : part == 1 ? own.end() : last;
    const int end = part == 0 ? before : part == 1 ? own.next : total;
    constexpr int ROWS = THREADS / ROW_LANES;
    // The result is below 2^31, so that the sum of two results does not overflow.
    const auto rows_of = [&](int64_t shares) {
      return static_cast<unsigned>(min(shares * ROWS, int64_t{INT32_MAX}));
    };
    const unsigned step = rows_of(behind_all ? int64_t{max(documents, 1)} * blocks : blocks);
    const unsigned mine = rows_of(behind_all ? int64_t{number} * blocks + block : block);
    const unsigned count = max(end - begin, 0);
#pragma unroll 1
    for (unsigned i = mine + (fresh_thread() - FIRST) / ROW_LANES; i < count; i += step) {
      f(begin + static_cast<int>(i));
    }
  }
}

// Stores this thread's part of a row of zeros.
template <int ELEMENT_BYTES>
__device__ __forceinline__ void zero_row(const View& view, int head_kv, int head_in_group, int row,
                                         int columns) {
  // Makes the compiler compute products with strides here, instead of keeping them in registers.
  asm volatile("" : "+r"(head_kv), "+r"(head_in_group));
  uint8_t* first =
      static_cast<uint8_t*>(view.data) +
      ELEMENT_BYTES * (head_kv * view.head_kv + head_in_group * view.head_group + row * view.row);
#pragma unroll 1
  for (int i = fresh_thread() % ROW_LANES * 16; i < columns * ELEMENT_BYTES; i += ROW_LANES * 16) {
    store_global_16(first + i, {0, 0, 0, 0});
  }
}

// Fills out and lse of a query head in uncovered rows. Threads from FIRST on take part.
template <class Config, int ELEMENT_BYTES, int FIRST = 0>
__device__ __forceinline__ void fill_uncovered(const FwdParams& p, const FwdBlock& at) {
  constexpr int BLOCK_M = Config::BLOCK_M;
  for_uncovered_rows<Config::THREADS - FIRST, FIRST>(
      p.packing.cu_seqlens_q, at.batch, p.batch, p.total_q, p.seqlen_q, at.row0 / BLOCK_M,
      (p.seqlen_q + BLOCK_M - 1) / BLOCK_M, [&](int row) {
        zero_row<ELEMENT_BYTES>(p.out, at.head_kv, at.head_in_group, row, p.head_dim_v);
        if (threadIdx.x % ROW_LANES == 0)
          p.lse[lse_begin(p, at.batch, at.head, 0) + row] = -INFINITY;
      });
}

}  // namespace flash_dist
