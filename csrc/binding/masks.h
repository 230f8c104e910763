// Reads the mask of a call: integers in host memory, the first of which is the kind, and arrays in
// one tensor on the GPU. flash_dist/masks/layout.py defines their layout.
#pragma once

#include <cstdint>

#include "binding/tensors.h"
#include "mask_layout.h"

namespace flash_dist::binding {

inline MaskParams read_band(Ints ints, const Sizes& s) {
  STD_TORCH_CHECK(
      ints.size() == BAND_INTS && ints[BAND_LEFT] >= -1 && ints[BAND_RIGHT] >= -1,
      "mask must be [0, left, right, bottom_right] with left and right at least -1, got ",
      show_numbers(ints));
  const MaskBand band = make_band(ints[BAND_LEFT], ints[BAND_RIGHT], ints[BAND_BOTTOM_RIGHT] != 0,
                                  s.seqlen_q, s.seqlen_k);
  MaskParams mask{};
  mask.kind = band.kind;
  mask.left = band.left;
  mask.right = band.right;
  mask.bottom_right = band.bottom_right;
  return mask;
}

// The arrays in mask_data. The mask's integers include the offset of each array.
class MaskArrays {
 public:
  MaskArrays(Ints ints, const Tensor& data) : ints_(ints), data_(data) {}

  // Sets `array` to the address of array WHICH, which must have at least `count` elements; null if
  // it is absent. Fails if a required array is absent.
  template <int WHICH, class T>
  void read(const T*& array, int64_t count, bool required) const {
    constexpr int WIDTH = MASK_ARRAY_WIDTHS[WHICH];
    static_assert(sizeof(T) == WIDTH * sizeof(int));
    array = reinterpret_cast<const T*>(find(WHICH, count * WIDTH, required));
  }

  // Reads the list whose three arrays start at array FIRST. Only the device knows its number of
  // entries.
  template <int FIRST>
  void read_list(TileList& list, int64_t lines, bool required) const {
    read<FIRST>(list.begin, lines + 1, required);
    read<FIRST + 1>(list.entries, 0, required);
    read<FIRST + 2>(list.slots, 0, required);
  }

 private:
  const int* find(int which, int64_t size, bool required) const {
    const char* name = MASK_ARRAY_NAMES[which];
    const int64_t offset = ints_[MASK_SIZES + which];
    STD_TORCH_CHECK(offset >= 0 || (offset == MASK_ABSENT && !required), "array ", name,
                    " of the mask must have an offset of at least 0",
                    required ? "" : ", or -1 where it is absent", ", got ", offset);
    if (offset < 0) return nullptr;
    STD_TORCH_CHECK(
        offset % MASK_ALIGNMENT == 0 && size <= data_.numel() && offset <= data_.numel() - size,
        "array ", name, " of the mask must begin at a multiple of ", MASK_ALIGNMENT,
        " and end within the ", data_.numel(), " numbers of mask_data, got ", size,
        " numbers from ", offset, " on");
    return pointer<int>(data_) + offset;
  }

  const Ints ints_;
  const Tensor& data_;
};

// Checks the mask's integers and arrays against the sizes of the call.
inline void check_mask(Ints ints, const Tensor& data, const Tensor& q, const Sizes& s) {
  STD_TORCH_CHECK(!s.packed,
                  "mask must be of kind 0 (causal, a window or full) with cu_seqlens, got kind ",
                  ints[MASK_KIND]);
  constexpr size_t INTS = MASK_SIZES + MASK_ARRAYS;
  STD_TORCH_CHECK(ints.size() == INTS, "mask must have ", INTS, " numbers, got ", ints.size());
  STD_TORCH_CHECK(data.scalar_type() == ScalarType::Int && is_on_gpu_of(data, q) &&
                      data.dim() == 1 && data.is_contiguous(),
                  "mask_data must be contiguous int32 of one dimension on ", show_device(q),
                  ", got ", show(data));
  const int64_t past = reinterpret_cast<uintptr_t>(data.data_ptr()) % ALIGNMENT;
  STD_TORCH_CHECK(past == 0, "mask_data must begin at a multiple of ", ALIGNMENT, " bytes, got ",
                  past, " bytes past one");
  const int64_t batches = ints[MASK_BATCHES], heads = ints[MASK_HEADS];
  STD_TORCH_CHECK((batches == 1 || batches == s.batch) && (heads == 1 || heads == s.num_heads_q()),
                  "mask must be for 1 or ", s.batch, " batch entries and 1 or ", s.num_heads_q(),
                  " heads, got ", batches, " and ", heads);
  const int64_t seqlen_q = ints[MASK_SEQLEN_Q], seqlen_k = ints[MASK_SEQLEN_K];
  STD_TORCH_CHECK(seqlen_q == s.seqlen_q && seqlen_k == s.seqlen_k, "mask must be for ", s.seqlen_q,
                  " queries and ", s.seqlen_k, " keys, got ", seqlen_q, " and ", seqlen_k);
}

// Reads the arrays of a mask of kind ROWS or TILES.
inline MaskParams read_arrays(Ints ints, const Tensor& data, const Tensor& q, const Sizes& s) {
  check_mask(ints, data, q, s);
  const int64_t batches = ints[MASK_BATCHES], heads = ints[MASK_HEADS], planes = batches * heads;
  const auto tiles = [](int rows, int width) { return (int64_t{rows} + width - 1) / width; };
  MaskParams mask{};
  mask.kind = static_cast<MaskKind>(ints[MASK_KIND]);
  mask.left = mask.right = UNBOUNDED;
  mask.batch_planes = batches > 1 ? static_cast<int>(heads) : 0;
  mask.head_planes = heads > 1 ? 1 : 0;
  mask.query_tiles = static_cast<int>(tiles(s.seqlen_q, MASK_TILE));
  mask.key_tiles = static_cast<int>(tiles(s.seqlen_k, MASK_TILE));

  const MaskArrays arrays(ints, data);
  const bool by_rows = mask.kind == MaskKind::ROWS;
  const int64_t query_tiles = planes * mask.query_tiles, key_tiles = planes * mask.key_tiles;
  const int64_t query_pairs = planes * tiles(s.seqlen_q, 2 * MASK_TILE);
  const int64_t key_pairs = planes * tiles(s.seqlen_k, 2 * MASK_TILE);
  arrays.read<ARRAY_KEY_BOUNDS>(mask.key_bounds, batches, false);
  arrays.read<ARRAY_ROWS>(mask.rows, query_tiles * MASK_TILE, by_rows);
  arrays.read<ARRAY_QUERY_RANGES>(mask.query_ranges, query_tiles, by_rows);
  arrays.read<ARRAY_KEY_RANGES>(mask.key_ranges, key_tiles, by_rows);
  arrays.read<ARRAY_KEY_SLOTS>(mask.key_slots, mask.key_tiles + int64_t{1}, true);
  arrays.read_list<ARRAY_BY_QUERY_64_BEGIN>(mask.by_query[0], query_tiles, !by_rows);
  arrays.read_list<ARRAY_BY_KEY_64_BEGIN>(mask.by_key[0], key_tiles, !by_rows);
  arrays.read_list<ARRAY_BY_QUERY_128_BEGIN>(mask.by_query[1], query_pairs, !by_rows);
  arrays.read_list<ARRAY_BY_KEY_128_BEGIN>(mask.by_key[1], key_pairs, !by_rows);
  arrays.read<ARRAY_BITS>(mask.bits, 0, false);
  return mask;
}

inline MaskParams read_mask(Ints ints, const MaybeTensor& data, const Tensor& q, const Sizes& s) {
  STD_TORCH_CHECK(!ints.empty() && 0 <= ints[0] && ints[0] <= 2,
                  "mask must begin with its kind, 0, 1 or 2, got ", show_numbers(ints));
  if (ints[0] == static_cast<int>(MaskKind::BAND)) return read_band(ints, s);
  STD_TORCH_CHECK(data.has_value(), "mask_data must be a tensor for a mask of kind ", ints[0],
                  ", got None");
  return read_arrays(ints, *data, q, s);
}

// Returns the host's copy of key_slots, from which the backward plans its chunks; null for a band,
// or if the caller has none.
inline const int* read_key_slots(const MaybeTensor& slots, const MaskParams& mask) {
  if (!slots || mask.kind == MaskKind::BAND) return nullptr;
  STD_TORCH_CHECK(slots->is_cpu() && slots->scalar_type() == ScalarType::Int &&
                      slots->is_contiguous() && slots->numel() == int64_t{mask.key_tiles} + 1,
                  "mask_slots must be contiguous int32 with ", mask.key_tiles + 1,
                  " numbers on cpu, got ", show(*slots));
  return pointer<int>(*slots);
}

// Returns the mask's integers from a tensor in host memory.
inline Ints read_integers(const Tensor& mask) {
  STD_TORCH_CHECK(mask.is_cpu() && mask.scalar_type() == ScalarType::Long && mask.dim() == 1 &&
                      mask.is_contiguous(),
                  "mask must be contiguous int64 of one dimension on cpu, got ", show(mask));
  return {pointer<const int64_t>(mask), static_cast<size_t>(mask.numel())};
}

}  // namespace flash_dist::binding
