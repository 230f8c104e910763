// Prints how backward calls are split into launches: one JSON object per line of input numbers.
//
//   g++ -std=c++17 -I csrc -I flash_dist/toolkit -I GENERATED csrc/debug/plans.cpp csrc/host/plan.cpp
//
// The generator writes its headers into GENERATED. This program needs no CUDA, so host decisions
// that affect bits can be inspected and compared on any machine.
#include <cstdint>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/plan.h"
#include "host/plan_json.h"
#include "native/values.h"

using namespace flash_dist;

namespace {

struct Request {
  BwdShape shape{};
  BwdKernels kernels{};
  int64_t budget = 0;
  bool batch_invariant = false;
  std::vector<Values> compiled;  // compiled sizes of the dK/dV kernel
  std::vector<int> key_slots;
};

template <class T>
T next(std::istream& line) {
  T value{};
  if (!(line >> value)) throw std::runtime_error("a line is too short");
  return value;
}

// Reads a mask: kind, left, right and bottom_right. -1 for left or right: unbounded.
MaskBand read_mask(std::istream& line, int seqlen_q, int seqlen_k) {
  const auto kind = static_cast<MaskKind>(next<int>(line));
  const int left = next<int>(line);
  const int right = next<int>(line);
  const bool bottom_right = next<int>(line) != 0;
  if (kind == MaskKind::BAND) return make_band(left, right, bottom_right, seqlen_q, seqlen_k);
  return {kind, UNBOUNDED, UNBOUNDED, 0};
}

// Reads one line of numbers:
//
//   batch seqlen_q seqlen_k num_heads_kv group total_q head_dim head_dim_v
//   mask: kind left right bottom_right
//   sm_count key_tile blocks_per_sm dq_rows dq_blocks_per_sm cluster fused
//   budget batch_invariant normalizes aligned per_head
//   number of key_slots (-1: unknown), then the key_slots
//   number of compiled sizes, then the sizes
Request read_request(std::istream& line) {
  Request r;
  BwdShape& s = r.shape;
  for (int* field : {&s.batch, &s.seqlen_q, &s.seqlen_k, &s.num_heads_kv, &s.group, &s.total_q}) {
    *field = next<int>(line);
  }
  const int head_dim = next<int>(line);
  s.columns_v = next<int>(line);
  s.mask = read_mask(line, s.seqlen_q, s.seqlen_k);
  BwdKernels& k = r.kernels;
  for (int* field :
       {&k.sm_count, &k.key_tile, &k.blocks_per_sm, &k.dq_rows, &k.dq_blocks_per_sm, &k.cluster}) {
    *field = next<int>(line);
  }
  k.fused = next<int>(line) != 0;
  r.budget = next<int64_t>(line);
  r.batch_invariant = next<int>(line) != 0;
  s.normalizes = next<int>(line) != 0;
  s.aligned = next<int>(line) != 0;
  s.per_head = next<int>(line) != 0;
  const int slots = next<int>(line);
  for (int i = 0; i < slots; ++i) r.key_slots.push_back(next<int>(line));
  const int sizes = next<int>(line);
  for (int i = 0; i < sizes; ++i) {
    const int columns = next<int>(line);
    r.compiled.push_back({0, columns, next<int>(line)});
  }
  const Values size = smallest_holding(r.compiled, {0, head_dim, s.columns_v});
  s.head_dim = size[HEAD_DIM_AXIS];
  s.head_dim_v = size[HEAD_DIM_V_AXIS];
  if (!may_store_ds(k.dq_rows > 0, r.budget, r.batch_invariant)) k.dq_rows = k.dq_blocks_per_sm = 0;
  if (slots >= 0) s.key_slots = r.key_slots.data();
  return r;
}

}  // namespace

int main() {
  std::string text;
  while (std::getline(std::cin, text)) {
    std::istringstream line(text);
    try {
      const Request r = read_request(line);
      std::cout << describe_plan(plan_backward(r.shape, r.kernels, r.budget, r.batch_invariant))
                << "\n";
    } catch (const std::exception& error) {
      std::cerr << "error: " << error.what() << ": " << text << "\n";
      return 1;
    }
  }
  return 0;
}
