// The visits of a part of a bias: the batch entries and query heads that share it.
#pragma once

#include <cstdint>

namespace flash_dist {

// A head and batch entry of a bias, and one split of the visits that share them.
struct BiasPart {
  int head, batch;  // position in the bias
  int index;        // index of (split, batch entry, head)
  int first, end;   // range of the visits' indices

  BiasPart() = default;
  template <class Params>
  __device__ __forceinline__ BiasPart(const Params& p, int index) : index(index) {
    head = index % p.heads;
    const int rest = index / p.heads;
    batch = rest % p.batches;
    take_split(p, rest / p.batches);
  }

  // Sets the range of visits to that of a split.
  template <class Params>
  __device__ __forceinline__ void take_split(const Params& p, int split) {
    const int64_t visits = p.visits;
    first = static_cast<int>(visits * split / p.splits);
    end = static_cast<int>(visits * (split + 1) / p.splits);
  }
};

// A visit: one batch entry and query head.
struct BiasVisit {
  int batch, head;

  template <class Params>
  __device__ __forceinline__ BiasVisit(const Params& p, const BiasPart& part, int number)
      : batch(part.batch), head(part.head) {
    if (p.heads == 1) {  // all query heads share the bias
      const int num_heads_q = p.p.num_heads_kv * p.p.group;
      head = number % num_heads_q;
      number /= num_heads_q;
    }
    if (p.batches == 1) batch = number;
  }
};

}  // namespace flash_dist
