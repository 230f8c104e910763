// Splits of attention to a cache, and the workspace of its partial results.
#pragma once

#include <cstdint>

#include "core/decode.h"
#include "host/capi.h"
#include "host/kernel_key.h"

namespace flash_dist {

// One call. The GPU and the budget decide which block computes what, and no bit of the result.
class Decode {
 public:
  // budget: bytes that workspace_bytes() may be.
  Decode(const Call& call, const DecodeParams& params, int64_t budget);

  int64_t workspace_bytes() const { return stats_bytes_ + out_bytes_; }
  void run(void* workspace);

 private:
  KernelKey key_of(Role role) const;
  Loaded choose_kernel() const;
  int64_t tiles() const;
  int64_t longest_key_blocks() const;
  int64_t most_key_blocks() const;
  void check_key_blocks() const;
  void place(int64_t key_blocks, int64_t budget);

  const Call& call_;
  DecodeParams p_;
  const Loaded kernel_;
  const int softmax_blocks_;  // key blocks of one softmax
  int64_t stats_bytes_ = 0, out_bytes_ = 0;
};

// Whether sequences of a forward may be few queries on many keys, and there are kernels for these.
bool may_have_few_queries(const Call& call, const FwdParams& p);

// The call that computes those sequences alone.
DecodeParams few_queries_of(const FwdParams& p);

}  // namespace flash_dist
