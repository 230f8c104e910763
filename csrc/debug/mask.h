// The masks of the command line: which keys are visible to each query, and the arrays that the
// kernels read for masks other than bands. Plain C++, without CUDA or torch.
#pragma once

#include <string>
#include <vector>

namespace flash_dist::debug {

struct Mask {
  enum class Form { BAND, BLOCK_CAUSAL };

  std::string text = "causal";  // as written on the command line
  Form form = Form::BAND;
  int left = -1, right = 0;  // for BAND: keys to the left and right of the diagonal; -1: unbounded
  bool bottom_right = true;  // for BAND; true: aligned bottom right, false: top left
  int blocks = 0;            // BLOCK_CAUSAL: number of equal blocks of queries, and of keys
};

// Keys [begin, end); begin = end = 0 if no key is visible to the query.
struct Keys {
  int begin, end;
};

Keys visible_keys(const Mask& mask, int query, int seqlen_q, int seqlen_k);

// The arrays of MaskParams (params.h) for MaskKind::ROWS, with one plane for all batch entries and
// heads.
struct RowArrays {
  std::vector<int> rows;          // [query_tiles * 64, 2]
  std::vector<int> query_ranges;  // [query_tiles, 4]
  std::vector<int> key_ranges;    // [key_tiles, 2]
  std::vector<int> key_slots;     // [key_tiles + 1]
};

RowArrays row_arrays(const Mask& mask, int seqlen_q, int seqlen_k);

}  // namespace flash_dist::debug
