// The command line of attention_debug. Plain C++, without CUDA or torch.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "mask.h"

namespace flash_dist::debug {

struct Options {
  int batch = 2;
  int seqlen_q = 1024, seqlen_k = 1024;
  int num_heads_q = 8, num_heads_kv = 8;
  int head_dim = 128, head_dim_v = 0;  // head_dim_v: head_dim by default
  std::string dtype = "bf16";
  Mask mask;
  uint64_t seed = 0;
  double softmax_scale = 0;  // default: head_dim ** -0.5
  int repeats = 10;
  int timing_runs = 50;
  std::string reference = "gpu";
  int64_t budget_mb = 1536;
  bool batch_invariant = false;
  bool forward_only = false;
  int device = 0;
  bool parse_only = false;
  bool help = false;

  int group() const { return num_heads_q / num_heads_kv; }
  // Describes the tensors, mask, softmax_scale and seed. --parse-only and every run print it.
  std::string describe() const;
};

// Error for wrong usage of the command line, with a hint that may be empty.
struct UsageError : std::runtime_error {
  explicit UsageError(const std::string& sentence, std::string hint = "")
      : std::runtime_error(sentence), hint(std::move(hint)) {}
  std::string hint;
};

Options parse_options(const std::vector<std::string>& arguments);
std::string usage();

}  // namespace flash_dist::debug
