// Size limits of the kernels' 32-bit arithmetic. Larger calls are refused before anything is
// allocated. Header only, so that the binding has the same messages.
#pragma once

#include <cstdint>
#include <string>

#include "core/band.h"

namespace flash_dist {

constexpr int64_t ROW_MARGIN = 128;  // the largest tile, which kernels may add to a row index
// Maximum sequence length. Up to this length, the sum of a query's index, seqlen_k - seqlen_q and a
// side of a band fits in the kernels' 32 bits.
constexpr int64_t MAX_SEQLEN = UNBOUNDED - ROW_MARGIN;
// Maximum length of a packed axis. For queries, ROW_MARGIN rows per sequence count too
// (core/sequence.cuh).
constexpr int64_t MAX_TOTAL = INT32_MAX - ROW_MARGIN - 1;

struct CallSizes {
  int64_t batch, seqlen_q, seqlen_k, num_heads_q;  // packed: longest seqlen_q, seqlen_k
  int64_t total_q, total_k;                        // packed: numbers of tokens, else 0
};

// Returns a message about the first size that is too large, or about num_heads_q below 1; empty if
// there is no such size.
inline std::string find_size_problem(const CallSizes& s) {
  const auto most = [](const char* name, int64_t limit, const std::string& got) {
    return std::string(name) + " must be at most " + std::to_string(limit) + ", got " + got;
  };
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (s.seqlen_q > MAX_SEQLEN) return most("seqlen_q", MAX_SEQLEN, text(s.seqlen_q));
  if (s.seqlen_k > MAX_SEQLEN) return most("seqlen_k", MAX_SEQLEN, text(s.seqlen_k));
  if (s.num_heads_q < 1) return "num_heads_q must be at least 1, got " + text(s.num_heads_q);
  if (s.batch * s.num_heads_q > INT32_MAX) {
    return most("batch * num_heads_q", INT32_MAX, text(s.batch) + " * " + text(s.num_heads_q));
  }
  if (s.total_k > MAX_TOTAL) return most("total_k", MAX_TOTAL, text(s.total_k));
  if (s.total_q > 0 && s.total_q + ROW_MARGIN * s.batch > MAX_TOTAL) {
    return most("total_q + 128 * batch", MAX_TOTAL, text(s.total_q) + " + 128 * " + text(s.batch));
  }
  return {};
}

}  // namespace flash_dist
