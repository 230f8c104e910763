// The kernel arguments that the planner of the backward needs: the part of a mask that needs no
// arrays, and the location of the sums of dK and dV. This file includes no CUDA header, so any C++
// compiler can compile it.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASH_DIST_HOST_DEVICE __host__ __device__
#else
#define FLASH_DIST_HOST_DEVICE
#endif

namespace flash_dist {

enum class MaskKind : int {
  BAND,   // query i attends to keys [i + shift - left, i + shift + right]; needs no arrays
  ROWS,   // query i attends to keys [rows[i].x, rows[i].y)
  TILES,  // a list of visible tiles: each is full, limited by `rows`, or has a bit per score
};

constexpr int UNBOUNDED = 1 << 30;  // value of left or right: this side of the band is unlimited
constexpr int MASK_TILE = 64;       // number of queries, and of keys, per tile in the mask's arrays

struct MaskBand {
  MaskKind kind;
  int left, right;   // for BAND: keys to the left and right of the diagonal; UNBOUNDED: no limit
  int bottom_right;  // for BAND; 1: shift = seqlen_k - seqlen_q; 0: shift = 0
};

// Makes a band of `left` and `right` keys around the diagonal; -1 is unlimited. A side that masks
// nothing becomes UNBOUNDED, so that a wide window gets the same plan as no mask.
inline MaskBand make_band(int64_t left, int64_t right, bool bottom_right, int seqlen_q,
                          int seqlen_k) {
  const auto side = [](int64_t width, int64_t beyond) {
    const int64_t most = beyond < UNBOUNDED ? beyond : UNBOUNDED;
    return width < 0 || width >= most ? UNBOUNDED : static_cast<int>(width);
  };
  return {MaskKind::BAND, side(left, (bottom_right ? seqlen_k : seqlen_q) - int64_t{1}),
          side(right, (bottom_right ? seqlen_q : seqlen_k) - int64_t{1}), bottom_right};
}

// True if every key is visible to every query and `packed` is false: all blocks take equally long.
template <class Mask>  // MaskBand or MaskParams
FLASH_DIST_HOST_DEVICE bool is_even(const Mask& mask, bool packed) {
  return mask.kind == MaskKind::BAND && mask.left >= UNBOUNDED && mask.right >= UNBOUNDED &&
         !packed;
}

// Locates the rows of the fp32 sums of dK and dV in the workspace: partial sums of the splits, and
// sums kept between query chunks. A unit is a (batch, kv head) pair.
struct SumRows {
  int64_t first;        // row of key 0 of the chunk's first unit in split 0
  int64_t split, unit;  // distance in rows between group splits, and between units
};

}  // namespace flash_dist
