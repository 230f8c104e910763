// The work tiles of the Hopper forward that is bit-identical to decoding.
#pragma once

#include "core/decode_work.cuh"
#include "sm90/fwd/work.cuh"

namespace flash_dist {

struct FwdKvcacheWork : FwdSm90Work {
  __device__ __forceinline__ void place_block(const FwdParams& p, const CacheParams& cache,
                                              int block_m, int number) {
    block = FwdBlock(p, block_m, number);
    written();
    const CacheKeys exist(cache, block.batch, p.batch);
    sequence = Sequence(0, exist.leftpad, p.seqlen_q, exist.seqlen);
    written();
    if (p.packing.cu_seqlens_q == nullptr) return;
    const DocumentRows rows(p.packing.cu_seqlens_q, block.batch, p.batch, p.total_q, p.seqlen_q);
    sequence.q0 = rows.begin;
    sequence.seqlen_q = rows.length;
    sequence.uncovered_q = rows.uncovered;
    written();
  }

  // Finds the keys. Supports bands only, because testing the kind of mask would take registers.
  __device__ __forceinline__ void find_keys(const FwdParams& p, int block_m, int block_n) {
    FwdParams band = p;
    band.mask.kind = MaskKind::BAND;
    FwdSm90Work::find_keys(band, block_m, block_n);
  }

  __device__ __forceinline__ bool has_scores() const { return has_queries() && has_keys(); }
  __device__ __forceinline__ int key_blocks() const { return bounds.end - bounds.begin; }
};

}  // namespace flash_dist
