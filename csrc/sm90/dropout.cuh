// Dropout in the Hopper kernels, with the random numbers of core/dropout.cuh. Values that are the
// same in all lanes of a warp are in its uniform registers.
#pragma once

#include "core/dropout.cuh"
#include "core/panels.cuh"
#include "sm90/steps.cuh"

namespace flash_dist {

struct DropoutState {
  uint32_t key0, key1, offset, threshold;

  __device__ __forceinline__ explicit DropoutState(const DropoutParams& p)
      : key0(uniform(static_cast<uint32_t>(p.rng_state[0]))),
        key1(uniform(static_cast<uint32_t>(static_cast<uint64_t>(p.rng_state[0]) >> 32))),
        offset(uniform(static_cast<uint32_t>(p.rng_state[1]))),
        threshold(p.threshold) {}
};

// Dropout of a warp's 16 queries from row0 on.
struct QueryDropout : DropoutState {
  uint32_t sequence_head;
  uint32_t query, key;  // counter words for this lane's scores of keys 0 to 15

  __device__ __forceinline__ QueryDropout(const DropoutParams& p, uint32_t sequence_head_, int row0)
      : DropoutState(p),
        sequence_head(sequence_head_),
        query(row0 / 2 + fresh_thread() % 32 / 4),
        key(fresh_thread() % 4) {}

  // Zeroes the dropped elements of `a`, the A operand of P for the 16 keys from first_key on.
  __device__ __forceinline__ void drop(uint32_t (&a)[4], int first_key) const {
    uint32_t x[1][4] = {{query, key + first_key / 4, sequence_head, offset}};
    philox(x, this->key0, this->key1);
    drop_words(a, x[0], *this);
  }
};

// Dropout of a warp's 16 keys from first_key on, in S^T.
struct KeyDropout : DropoutState {
  int first_key;

  __device__ __forceinline__ KeyDropout(const DropoutParams& p, int first_key_)
      : DropoutState(p), first_key(first_key_) {}

  // Makes dropped weights negative, for the queries from row0 on.
  template <int NT>
  __device__ __forceinline__ void mark(Accumulator<1, NT>& pt, uint32_t sequence_head,
                                       int row0) const {
    const int lane = fresh_thread() % 32;
    const bool odd = lane / 4 % 2 != 0;
    const uint32_t query = row0 / 2 + lane % 4 * 2 + lane / 4 % 2, key = first_key / 4 + lane / 8;
    uint32_t before[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < NT / 2; ++j) {
      // NOTE: this is 0, because the low 16 bits of a threshold are 0. The compiler does not know
      // that, so it computes only two philox() at a time: more would need too many registers.
      const uint32_t none = before[j % 2] & threshold & 0xffff;
      uint32_t x[1][4] = {{query + j * 8 + none, key, sequence_head, offset}};
      philox(x, key0, key1);
      before[j % 2] = x[0][3];
      exchange_halves(x[0], odd);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& left = pt.x[0][2 * j + i / 2][i % 2 * 2];
        float& right = pt.x[0][2 * j + i / 2][i % 2 * 2 + 1];
        left = keeps_low(x[0][i], *this) ? left : -left;
        right = keeps_high(x[0][i], *this) ? right : -right;
      }
    }
  }
};

// The first key of each part of a step (sm90/steps.cuh), found once for all rows.
template <class Steps>
struct StepKeys {
  static constexpr int PARTS = Steps::PARTS == 0 ? 1 : Steps::PARTS;
  int first[PARTS];

  __device__ __forceinline__ StepKeys(const Steps& steps, int j) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) first[part] = uniform(steps.key(j, part * MASK_TILE));
  }
  // Returns the key of a row of the step.
  __device__ __forceinline__ int operator[](int row) const {
    const int part = PARTS == 1 ? 0 : row / MASK_TILE;
    return first[part] + row - part * MASK_TILE;
  }
};

}  // namespace flash_dist
