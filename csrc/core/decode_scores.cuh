// Soft cap and ALiBi of the kernels that read a cache.
#pragma once

#include "core/accumulator.cuh"
#include "core/decode_work.cuh"
#include "core/scores.cuh"

namespace flash_dist {

// Soft cap and ALiBi (core/scores.cuh) on two rows of a lane, whose heads may differ.
struct TileScores {
  float slope[2];
  int diagonal[2];  // key at distance 0, counted from the bottom right

  template <class Place>
  __device__ __forceinline__ TileScores(const DecodeParams& p, const DecodeCursor& at,
                                        const Place& own) {
    const int shift = CacheKeys(p.cache, at.batch, p.batch).seqlen - at.extent.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(at.row0(p) + own.row(h), at.extent.rows(p) - 1);
      const int query = divide(row, p.by_group);
      slope[h] = alibi_slope(p.scores, at.batch, at.head * p.group + row - query * p.group);
      diagonal[h] = query + shift;
    }
  }
  // S: keys from key0 on.
  template <int NT>
  __device__ __forceinline__ void apply_score_mod(Accumulator<1, NT>& s, const DecodeParams& p,
                                                  int key0) const {
    const ScoreParams& scores = p.scores;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s.x[0][n][e];
        x *= scores.scale_inside;
        if (scores.softcap > FAST_CAP) {
          x = scores.softcap * tanh_near(x);
        } else if (scores.softcap != 0.0f) {
          x = scores.softcap * tanh_of<Tanh::FAST>(x);
        }
        const int key = key0 + n * 8 + threadIdx.x % 4 * 2 + e % 2;
        const float distance = fabsf(static_cast<float>(diagonal[e / 2] - key));
        x = __fmaf_rn(-slope[e / 2], distance, x);
      }
  }
};

}  // namespace flash_dist
