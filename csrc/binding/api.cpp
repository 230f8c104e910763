// The torch operators, on the stable ABI: schemas, outputs and workspace from torch's allocator,
// the current stream. Arguments are checked in Python, where the error types are; here only what
// would corrupt memory.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "binding/call.h"
#include "host/capi.h"
#include "host/limits.h"
#include "mask_layout.h"

namespace {

using flash_dist::MASK_TILE;
using flash_dist::MaskKind;
using flash_dist::MaskParams;
using flash_dist::Packing;
using flash_dist::UNBOUNDED;
using namespace flash_dist::binding;
using MaybeTensor = std::optional<Tensor>;
using Ints = torch::headeronly::IntHeaderOnlyArrayRef;

// Contiguous, with the sizes of t but columns in the last dimension.
Tensor allocate_like(const Tensor& t, int64_t columns) {
  const auto shape = t.sizes();
  std::vector<int64_t> sizes(shape.begin(), shape.end());
  sizes.back() = columns;
  return allocate(sizes, torch_dtype(t), t.get_device_index());
}

// --- Shapes -----------------------------------------------------------------------------------

// Sizes of one call. Packed tensors have no batch axis; their seqlens are the longest.
struct Sizes {
  bool packed;
  int batch, seqlen_q, seqlen_k, num_heads_kv, group, head_dim, head_dim_v;
  int64_t total_q, total_k;  // rows of the packed axis
  int64_t num_heads_q() const { return int64_t{num_heads_kv} * group; }
  // Whether no query meets a key: there is nothing to launch, and outputs are constants.
  bool empty() const { return batch == 0 || seqlen_q == 0 || seqlen_k == 0; }
};

// q may have one axis more: [num_heads_kv, group] for num_heads_q.
Sizes read_sizes(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens_q,
                 int64_t max_seqlen_q, int64_t max_seqlen_k) {
  Sizes s{};
  s.packed = cu_seqlens_q.has_value();
  const int head = s.packed ? 1 : 2;
  STD_TORCH_CHECK(q.dim() == head + 2 || q.dim() == head + 3, "q must have ", head + 2, " or ",
                  head + 3, " dimensions, got ", q.dim());
  STD_TORCH_CHECK(k.dim() == head + 2 && v.dim() == head + 2, "k and v must have ", head + 2,
                  " dimensions, got ", k.dim(), " and ", v.dim());
  s.num_heads_kv = to_int(k.size(head), "num_heads_kv");
  if (q.dim() == head + 3) {
    s.group = to_int(q.size(head + 1), "heads per kv head");
    STD_TORCH_CHECK(q.size(head) == s.num_heads_kv, "dimension ", head,
                    " of q must be num_heads_kv of k, ", s.num_heads_kv, ", got ", q.size(head));
  } else {
    const int64_t heads = q.size(head);
    STD_TORCH_CHECK(s.num_heads_kv > 0 && heads % s.num_heads_kv == 0,
                    "num_heads_kv must divide num_heads_q, got ", s.num_heads_kv, " (k) and ",
                    heads, " (q)");
    s.group = to_int(heads / s.num_heads_kv, "heads per kv head");
  }
  s.head_dim = to_int(q.size(q.dim() - 1), "head_dim");
  s.head_dim_v = to_int(v.size(head + 1), "head_dim_v");
  if (s.packed) {
    s.batch = to_int(cu_seqlens_q->numel() - 1, "batch");
    s.total_q = to_int(q.size(0), "total_q");
    s.total_k = to_int(k.size(0), "total_k");
    s.seqlen_q = std::min(to_int(max_seqlen_q, "max_seqlen_q"), static_cast<int>(s.total_q));
    s.seqlen_k = std::min(to_int(max_seqlen_k, "max_seqlen_k"), static_cast<int>(s.total_k));
  } else {
    s.batch = to_int(q.size(0), "batch");
    s.seqlen_q = to_int(q.size(1), "seqlen_q");
    s.seqlen_k = to_int(k.size(1), "seqlen_k");
  }
  const std::string problem = flash_dist::find_size_problem(
      {s.batch, s.seqlen_q, s.seqlen_k, s.num_heads_q(), s.total_q, s.total_k});
  STD_TORCH_CHECK(problem.empty(), problem);
  return s;
}

// That t has these sizes, rows as the packed or batched axes.
void check_shape(const Tensor& t, const Tensor& q, const Sizes& s, bool queries, int columns,
                 const char* name) {
  check_kind(t, q, name);
  const bool split = queries && q.dim() == (s.packed ? 4 : 5);
  const int64_t heads = queries ? s.num_heads_q() : s.num_heads_kv;
  int64_t sizes[5];
  int n = 0;
  if (!s.packed) sizes[n++] = s.batch;
  sizes[n++] = s.packed ? (queries ? s.total_q : s.total_k) : (queries ? s.seqlen_q : s.seqlen_k);
  sizes[n++] = split ? s.num_heads_kv : heads;
  if (split) sizes[n++] = s.group;
  sizes[n++] = columns;
  const auto shape = t.sizes();
  STD_TORCH_CHECK(
      static_cast<int>(shape.size()) == n && std::equal(shape.begin(), shape.end(), sizes), name,
      " must have shape ", show_numbers(Ints(sizes, n)), ", got ", show_shape(t));
  const int64_t step = elements_at_once(t);
  STD_TORCH_CHECK(columns % step == 0, "the last dimension of ", name, " must be a multiple of ",
                  step, ", got ", columns);
}

void check_rows(const Tensor& t, const Tensor& q, const Sizes& s, const char* name) {
  const int64_t count = s.num_heads_q() * (s.packed ? s.total_q : int64_t{s.batch} * s.seqlen_q);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && is_on_gpu_of(t, q) && t.numel() == count,
                  name, " must be float32 on ", show_device(q), " with ", count,
                  " numbers, one for each query and head, got ", show(t));
}

// True if each row of t has memory of its own. Rows that are one memory (an expanded tensor, the
// gradient of a sum over queries) or overlap have no map: Hopper's kernels cannot read them, and the
// general ones give other bits than those of a copy.
bool has_own_rows(const Tensor& t, const Sizes& s) {
  if (dtype_of(t) == flash_dist::Dtype::FP32) return true;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const size_t row = s.packed ? 0 : 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    const bool repeated = strides[i] == 0 && i != row;  // a map has such an axis once
    if (sizes[i] > 1 && strides[i] < sizes.back() && !repeated) return false;
  }
  return true;
}

// t with a layout that every kernel reads: t or a copy. Gradients have the layout that autograd chose
// (expanded, a slice), tensors of a compiled graph the address that Inductor chose.
Tensor suit(const Tensor& t, const Sizes& s) {
  return is_loadable(t) && has_own_rows(t, s) ? t : copy(t);
}
Tensor suit_rows(const Tensor& rows) { return rows.is_contiguous() ? rows : copy(rows); }

Tensor allocate_lse(const Sizes& s, int device) {
  std::vector<int64_t> sizes{s.num_heads_q(), s.total_q};
  if (!s.packed) sizes = {s.batch, s.num_heads_q(), s.seqlen_q};
  return allocate(sizes, aoti_torch_dtype_float32(), device);
}

// num_heads_q is seen as [num_heads_kv, group], num_heads_kv as [num_heads_kv, 1].
flash_dist::View view(const Tensor& t, const Sizes& s, int group) {
  const auto strides = t.strides();
  const int row = s.packed ? 0 : 1;
  flash_dist::View view{};
  view.data = t.data_ptr();
  view.batch = s.packed ? 0 : strides[0];
  view.row = strides[row];
  const bool split = t.dim() == row + 4;
  view.head_group = strides[split ? row + 2 : row + 1];
  view.head_kv = split ? strides[row + 1] : strides[row + 1] * group;
  return view;
}

const int* cu_seqlens(const Tensor& t, const Tensor& q, const Sizes& s, const char* name) {
  const int64_t count = int64_t{s.batch} + 1;
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && is_on_gpu_of(t, q) && t.dim() == 1 &&
                      t.is_contiguous() && t.numel() == count,
                  name, " must be contiguous int32 [batch + 1], [", count, "], on ", show_device(q),
                  ", got ", show(t));
  return static_cast<const int*>(t.data_ptr());
}

Packing read_packing(const Tensor& q, const Sizes& s, const MaybeTensor& cu_seqlens_q,
                     const MaybeTensor& cu_seqlens_k) {
  check_together(cu_seqlens_q.has_value(), cu_seqlens_k.has_value(), "cu_seqlens_q",
                 "cu_seqlens_k");
  if (!s.packed) return {};
  return {cu_seqlens(*cu_seqlens_q, q, s, "cu_seqlens_q"),
          cu_seqlens(*cu_seqlens_k, q, s, "cu_seqlens_k")};
}

// --- Masks ------------------------------------------------------------------------------------

MaskParams read_band(Ints ints, const Sizes& s) {
  STD_TORCH_CHECK(
      ints.size() == flash_dist::BAND_INTS && ints[flash_dist::BAND_LEFT] >= -1 &&
          ints[flash_dist::BAND_RIGHT] >= -1,
      "mask must be [0, left, right, bottom_right] with left and right at least -1, got ",
      show_numbers(ints));
  const flash_dist::MaskBand band =
      flash_dist::make_band(ints[flash_dist::BAND_LEFT], ints[flash_dist::BAND_RIGHT],
                            ints[flash_dist::BAND_BOTTOM_RIGHT] != 0, s.seqlen_q, s.seqlen_k);
  MaskParams mask{};
  mask.kind = band.kind;
  mask.left = band.left;
  mask.right = band.right;
  mask.bottom_right = band.bottom_right;
  return mask;
}

// Turns the offsets among a mask's ints into arrays of mask_data.
class MaskReader {
 public:
  MaskReader(Ints ints, const Tensor& data, int64_t planes)
      : ints_(ints), data_(data), planes_(planes) {}

  // An array, of at least count elements of T; required: it must be there.
  template <class T>
  const T* array(int which, int64_t count, bool required) const {
    constexpr int WIDTH = sizeof(T) / sizeof(int);
    const char* name = flash_dist::MASK_ARRAY_NAMES[which];
    const int64_t offset = ints_.at(flash_dist::MASK_SIZES + which);
    STD_TORCH_CHECK(flash_dist::MASK_ARRAY_WIDTHS[which] == WIDTH, "array ", name,
                    " of the mask must be read ", flash_dist::MASK_ARRAY_WIDTHS[which],
                    " numbers at a time, got ", WIDTH);
    STD_TORCH_CHECK(offset >= 0 || (offset == flash_dist::MASK_ABSENT && !required), "array ", name,
                    " of the mask must have an offset of at least 0",
                    required ? "" : ", or -1 where it is absent", ", got ", offset);
    if (offset < 0) return nullptr;
    const int64_t size = count * WIDTH;
    STD_TORCH_CHECK(offset % flash_dist::MASK_ALIGNMENT == 0 && size <= data_.numel() &&
                        offset <= data_.numel() - size,
                    "array ", name, " of the mask must begin at a multiple of ",
                    flash_dist::MASK_ALIGNMENT, " and end within the ", data_.numel(),
                    " numbers of mask_data, got ", size, " numbers from ", offset, " on");
    return reinterpret_cast<const T*>(static_cast<const int*>(data_.data_ptr()) + offset);
  }

  // The list that begins with array `which`; how many entries it has only the device knows.
  flash_dist::TileList list(int which, int64_t lines, bool required) const {
    return {array<int>(which, planes_ * lines + 1, required), array<int4>(which + 1, 0, required),
            array<int2>(which + 2, 0, required)};
  }

 private:
  const Ints ints_;
  const Tensor& data_;
  const int64_t planes_;
};

MaskParams read_arrays(Ints ints, const Tensor& data, const Tensor& q, const Sizes& s) {
  STD_TORCH_CHECK(!s.packed,
                  "mask must be of kind 0 (causal, a window or full) with cu_seqlens, got ",
                  "kind ", ints[flash_dist::MASK_KIND]);
  constexpr size_t INTS = flash_dist::MASK_SIZES + flash_dist::MASK_ARRAYS;
  STD_TORCH_CHECK(ints.size() == INTS, "mask must have ", INTS, " numbers, got ", ints.size());
  STD_TORCH_CHECK(data.scalar_type() == ScalarType::Int && is_on_gpu_of(data, q) &&
                      data.dim() == 1 && data.is_contiguous(),
                  "mask_data must be contiguous int32 of one dimension on ", show_device(q),
                  ", got ", show(data));
  const int64_t past = reinterpret_cast<uintptr_t>(data.data_ptr()) % ALIGNMENT;
  STD_TORCH_CHECK(past == 0, "mask_data must begin at a multiple of ", ALIGNMENT, " bytes, got ",
                  past, " bytes past one");
  const int64_t batches = ints[flash_dist::MASK_BATCHES];
  const int64_t heads = ints[flash_dist::MASK_HEADS];
  STD_TORCH_CHECK((batches == 1 || batches == s.batch) && (heads == 1 || heads == s.num_heads_q()),
                  "mask must be for 1 or ", s.batch, " batch entries and 1 or ", s.num_heads_q(),
                  " heads, got ", batches, " and ", heads);
  const int64_t seqlen_q = ints[flash_dist::MASK_SEQLEN_Q];
  const int64_t seqlen_k = ints[flash_dist::MASK_SEQLEN_K];
  STD_TORCH_CHECK(seqlen_q == s.seqlen_q && seqlen_k == s.seqlen_k, "mask must be for ", s.seqlen_q,
                  " queries and ", s.seqlen_k, " keys, got ", seqlen_q, " and ", seqlen_k);

  MaskParams mask{};
  mask.kind = static_cast<MaskKind>(ints[flash_dist::MASK_KIND]);
  mask.left = mask.right = UNBOUNDED;
  mask.batch_planes = batches > 1 ? static_cast<int>(heads) : 0;
  mask.head_planes = heads > 1 ? 1 : 0;
  const auto tiles = [](int64_t rows, int width) { return (rows + width - 1) / width; };
  mask.query_tiles = static_cast<int>(tiles(s.seqlen_q, MASK_TILE));
  mask.key_tiles = static_cast<int>(tiles(s.seqlen_k, MASK_TILE));
  const int64_t planes = batches * heads;
  const bool by_rows = mask.kind == MaskKind::ROWS;

  const MaskReader reader(ints, data, planes);
  mask.key_bounds = reader.array<int2>(flash_dist::ARRAY_KEY_BOUNDS, batches, false);
  mask.rows =
      reader.array<int2>(flash_dist::ARRAY_ROWS, planes * mask.query_tiles * MASK_TILE, by_rows);
  mask.query_ranges =
      reader.array<int4>(flash_dist::ARRAY_QUERY_RANGES, planes * mask.query_tiles, by_rows);
  mask.key_ranges =
      reader.array<int2>(flash_dist::ARRAY_KEY_RANGES, planes * mask.key_tiles, by_rows);
  mask.key_slots = reader.array<int>(flash_dist::ARRAY_KEY_SLOTS, mask.key_tiles + 1, true);
  for (int g = 0; g < 2; ++g) {
    const int list = g * flash_dist::LIST_ARRAYS;
    const int width = MASK_TILE << g;
    mask.by_query[g] =
        reader.list(flash_dist::ARRAY_BY_QUERY_64_BEGIN + list, tiles(s.seqlen_q, width), !by_rows);
    mask.by_key[g] =
        reader.list(flash_dist::ARRAY_BY_KEY_64_BEGIN + list, tiles(s.seqlen_k, width), !by_rows);
  }
  mask.bits = reader.array<uint2>(flash_dist::ARRAY_BITS, 0, false);
  return mask;
}

MaskParams read_mask(Ints ints, const MaybeTensor& data, const Tensor& q, const Sizes& s) {
  STD_TORCH_CHECK(!ints.empty() && 0 <= ints[0] && ints[0] <= 2,
                  "mask must begin with its kind, 0, 1 or 2, got ", show_numbers(ints));
  if (ints[0] == static_cast<int>(MaskKind::BAND)) return read_band(ints, s);
  STD_TORCH_CHECK(data.has_value(), "mask_data must be a tensor for a mask of kind ", ints[0],
                  ", got None");
  return read_arrays(ints, *data, q, s);
}

// The host's copy of key_slots, with which stripes are planned.
const int* read_slots(const MaybeTensor& slots, const MaskParams& mask) {
  if (!slots || mask.kind == MaskKind::BAND) return nullptr;
  STD_TORCH_CHECK(slots->is_cpu() && slots->scalar_type() == ScalarType::Int &&
                      slots->is_contiguous() && slots->numel() == int64_t{mask.key_tiles} + 1,
                  "mask_slots must be contiguous int32 with ", mask.key_tiles + 1,
                  " numbers on cpu, got ", show(*slots));
  return static_cast<const int*>(slots->data_ptr());
}

// --- Scores -----------------------------------------------------------------------------------

// What a call does to its scores between scale and mask, and the sinks of its rows; {}: nothing.
struct Scores {
  double softcap = 0.0;
  MaybeTensor alibi_slopes;  // [num_heads_q] or [batch, num_heads_q]
  MaybeTensor sinks;         // [num_heads_q]
};

const float* read_floats(const Tensor& t, const Tensor& q, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && is_on_gpu_of(t, q) && t.is_contiguous(),
                  name, " must be contiguous float32 on ", show_device(q), ", got ", show(t));
  return static_cast<const float*>(t.data_ptr());
}

flash_dist::ScoreParams read_scores(const Scores& scores, const Tensor& q, const Sizes& s) {
  flash_dist::ScoreParams p{};
  p.softcap = static_cast<float>(scores.softcap);
  if (!scores.alibi_slopes) return p;
  const Tensor& slopes = *scores.alibi_slopes;
  const int64_t heads = s.num_heads_q();
  const bool shared = slopes.dim() == 1;
  STD_TORCH_CHECK(slopes.numel() == (shared ? heads : heads * s.batch) &&
                      slopes.size(slopes.dim() - 1) == heads,
                  "alibi_slopes must have shape [", heads, "] or [", s.batch, ", ", heads,
                  "], got ", show_shape(slopes));
  p.alibi = read_floats(slopes, q, "alibi_slopes");
  p.alibi_batch = shared ? 0 : static_cast<int>(heads);
  return p;
}

const float* read_sinks(const Scores& scores, const Tensor& q, const Sizes& s) {
  if (!scores.sinks) return nullptr;
  STD_TORCH_CHECK(scores.sinks->dim() == 1 && scores.sinks->numel() == s.num_heads_q(),
                  "sinks must have shape [", s.num_heads_q(), "], got ", show_shape(*scores.sinks));
  return read_floats(*scores.sinks, q, "sinks");
}

// lse of queries without keys: -inf, or what their heads' sinks are.
void fill_empty_lse(const Tensor& lse, const Scores& scores, const Sizes& s) {
  if (!scores.sinks || lse.numel() == 0) {
    return fill(lse, -std::numeric_limits<double>::infinity());
  }
  const auto sizes = lse.sizes();
  const int64_t strides[] = {0, 1, 0};
  const int dims = s.packed ? 2 : 3;
  const Tensor& sinks = *scores.sinks;
  AtenTensorHandle rows = nullptr;
  const bool made =
      aoti_torch__reinterpret_tensor(sinks.get(), dims, sizes.data(), strides + 3 - dims,
                                     sinks.storage_offset(), &rows) == AOTI_TORCH_SUCCESS;
  STD_TORCH_CHECK(made && aoti_torch_copy_(lse.get(), Tensor(rows).get(), 0) == AOTI_TORCH_SUCCESS,
                  "torch could not copy a tensor on GPU ", lse.get_device_index());
}

// Of queries without keys: lse is the sink.
void fill_empty_dsinks(const Tensor& dsinks, const MaybeTensor& dlse) {
  if (!dlse) return fill(dsinks, 0.0);
  STD_TORCH_CHECK(aoti_torch_copy_(dsinks.get(), dlse->get(), 0) == AOTI_TORCH_SUCCESS,
                  "torch could not copy a tensor on GPU ", dsinks.get_device_index());
}

// --- Operators --------------------------------------------------------------------------------

// The fields that FwdParams and BwdParams share.
template <class Params>
Params make_params(const Tensor& q, const Tensor& k, const Tensor& v, const Sizes& s,
                   const Packing& packing, const MaskParams& mask, double softmax_scale,
                   const Scores& scores) {
  Params p{};
  p.q = view(q, s, s.group);
  p.k = view(k, s, 1);
  p.v = view(v, s, 1);
  p.batch = s.batch;
  p.seqlen_q = s.seqlen_q;
  p.seqlen_k = s.seqlen_k;
  p.num_heads_kv = s.num_heads_kv;
  p.group = s.group;
  p.total_q = static_cast<int>(s.total_q);
  p.total_k = static_cast<int>(s.total_k);
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.packing = packing;
  p.mask = mask;
  p.scores = read_scores(scores, q, s);
  return p;
}

// Where documents are packed, and what a mask is; see the schemas.
struct Documents {
  const MaybeTensor& cu_seqlens_q;
  const MaybeTensor& cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
};

std::tuple<Tensor, Tensor> run_fwd(const Tensor& given_q, const Tensor& given_k,
                                   const Tensor& given_v, Ints mask, const MaybeTensor& mask_data,
                                   const Documents& documents, double softmax_scale, bool ieee,
                                   const Scores& scores = {}) {
  const auto& [cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k] = documents;
  const Sizes s = read_sizes(given_q, given_k, given_v, cu_seqlens_q, max_seqlen_q, max_seqlen_k);
  check_shape(given_q, given_q, s, true, s.head_dim, "q");
  check_shape(given_k, given_q, s, false, s.head_dim, "k");
  check_shape(given_v, given_q, s, false, s.head_dim_v, "v");
  const Tensor q = suit(given_q, s), k = suit(given_k, s), v = suit(given_v, s);
  const Packing packing = read_packing(q, s, cu_seqlens_q, cu_seqlens_k);
  auto p = make_params<flash_dist::FwdParams>(q, k, v, s, packing, read_mask(mask, mask_data, q, s),
                                              softmax_scale, scores);
  p.sinks = read_sinks(scores, q, s);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const flash_dist::Call call = make_call(q, ieee);
  Tensor out = allocate_like(q, s.head_dim_v);
  Tensor lse = allocate_lse(s, call.device);
  if (s.empty()) {
    fill(out, 0.0);
    fill_empty_lse(lse, scores, s);
    return {out, lse};
  }
  p.out = view(out, s, s.group);
  p.lse = static_cast<float*>(lse.data_ptr());
  Workspace workspace;
  check_status(flash_dist_fwd(&call, &p, &Workspace::allocate, &workspace));
  return {out, lse};
}

// What a forward had and returned, and the gradients of what it returned.
struct Saved {
  const Tensor& dout;
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& out;
  const Tensor& lse;
  const MaybeTensor& dlse;
};

// dsinks: like lse, where what each query adds to the gradient of its head's sink is written; null
// without sinks.
std::tuple<Tensor, Tensor, Tensor> run_bwd(
    const Saved& saved, Ints mask, const MaybeTensor& mask_data, const MaybeTensor& mask_slots,
    const Documents& documents, double softmax_scale, int64_t budget, bool batch_invariant,
    bool ieee, const Scores& scores = {}, const Tensor* dsinks = nullptr) {
  const auto& [dout, given_q, given_k, given_v, out, lse, dlse] = saved;
  const auto& [cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k] = documents;
  const Sizes s = read_sizes(given_q, given_k, given_v, cu_seqlens_q, max_seqlen_q, max_seqlen_k);
  check_shape(given_q, given_q, s, true, s.head_dim, "q");
  check_shape(given_k, given_q, s, false, s.head_dim, "k");
  check_shape(given_v, given_q, s, false, s.head_dim_v, "v");
  const Tensor q = suit(given_q, s), k = suit(given_k, s), v = suit(given_v, s);
  check_shape(dout, q, s, true, s.head_dim_v, "dout");
  check_shape(out, q, s, true, s.head_dim_v, "out");
  check_rows(lse, q, s, "lse");
  if (dlse) check_rows(*dlse, q, s, "dlse");
  const Packing packing = read_packing(q, s, cu_seqlens_q, cu_seqlens_k);
  auto p = make_params<flash_dist::BwdParams>(q, k, v, s, packing, read_mask(mask, mask_data, q, s),
                                              softmax_scale, scores);
  const flash_dist::BwdOptions options{budget, batch_invariant, read_slots(mask_slots, p.mask)};
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const flash_dist::Call call = make_call(q, ieee);
  Tensor dq = allocate_like(q, s.head_dim);
  Tensor dk = allocate_like(k, s.head_dim);
  Tensor dv = allocate_like(v, s.head_dim_v);
  if (s.empty()) {
    for (const Tensor& gradient : {dq, dk, dv}) fill(gradient, 0.0);
    if (dsinks != nullptr) fill_empty_dsinks(*dsinks, dlse);
    return {dq, dk, dv};
  }
  const Tensor suited_dout = suit(dout, s), suited_out = suit(out, s), suited_lse = suit_rows(lse);
  const MaybeTensor suited_dlse = dlse ? MaybeTensor(suit_rows(*dlse)) : std::nullopt;
  p.dout = view(suited_dout, s, s.group);
  p.dq = view(dq, s, s.group);
  p.dk = view(dk, s, 1);
  p.dv = view(dv, s, 1);

  flash_dist::DeltaParams d{};
  d.out = view(suited_out, s, s.group);
  d.dout = p.dout;
  d.lse = static_cast<const float*>(suited_lse.data_ptr());
  d.dlse = suited_dlse ? static_cast<const float*>(suited_dlse->data_ptr()) : nullptr;
  d.sinks = read_sinks(scores, q, s);
  if (dsinks != nullptr) {
    d.dsinks = static_cast<float*>(dsinks->data_ptr());
    if (s.packed) fill(*dsinks, 0.0);  // of rows that no document covers
  }

  Workspace workspace;
  check_status(flash_dist_bwd(&call, &d, &p, &options, &Workspace::allocate, &workspace));
  return {dq, dk, dv};
}

// The integers of a mask in host memory.
Ints read_integers(const Tensor& mask) {
  STD_TORCH_CHECK(mask.is_cpu() && mask.scalar_type() == ScalarType::Long && mask.dim() == 1 &&
                      mask.is_contiguous(),
                  "mask must be contiguous int64 of one dimension on cpu, got ", show(mask));
  return {static_cast<const int64_t*>(mask.data_ptr()), static_cast<size_t>(mask.numel())};
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const MaybeTensor& mask_data, const std::vector<int64_t>& mask,
                                     const MaybeTensor& cu_seqlens_q,
                                     const MaybeTensor& cu_seqlens_k, int64_t max_seqlen_q,
                                     int64_t max_seqlen_k, double softmax_scale, bool ieee,
                                     double softcap, const MaybeTensor& alibi_slopes,
                                     const MaybeTensor& sinks) {
  const Documents documents{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  return run_fwd(q, k, v, mask, mask_data, documents, softmax_scale, ieee,
                 {softcap, alibi_slopes, sinks});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const MaybeTensor& dlse, const MaybeTensor& mask_data,
    const MaybeTensor& mask_slots, const std::vector<int64_t>& mask,
    const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double softmax_scale, int64_t budget, bool batch_invariant, bool ieee,
    double softcap, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks) {
  const Documents documents{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  const std::vector<int64_t> none{0};
  const Tensor dsinks =
      allocate(sinks ? lse.sizes().vec() : none, aoti_torch_dtype_float32(), q.get_device_index());
  const auto [dq, dk, dv] = run_bwd({dout, q, k, v, out, lse, dlse}, mask, mask_data, mask_slots,
                                    documents, softmax_scale, budget, batch_invariant, ieee,
                                    {softcap, alibi_slopes, sinks}, sinks ? &dsinks : nullptr);
  return {dq, dk, dv, dsinks};
}

std::tuple<Tensor, Tensor> attention_no_grad(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& mask, const MaybeTensor& mask_data,
                                             double softmax_scale, bool ieee,
                                             const MaybeTensor& cu_seqlens_q,
                                             const MaybeTensor& cu_seqlens_k, int64_t max_seqlen_q,
                                             int64_t max_seqlen_k) {
  const Documents documents{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  return run_fwd(q, k, v, read_integers(mask), mask_data, documents, softmax_scale, ieee);
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_no_grad(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const MaybeTensor& dlse, const Tensor& mask, const MaybeTensor& mask_data,
    const MaybeTensor& mask_slots, double softmax_scale, int64_t budget, bool batch_invariant,
    bool ieee, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k) {
  const Documents documents{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  return run_bwd({dout, q, k, v, out, lse, dlse}, read_integers(mask), mask_data, mask_slots,
                 documents, softmax_scale, budget, batch_invariant, ieee);
}

}  // namespace

STABLE_TORCH_LIBRARY(flash_dist, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? mask_data, int[] mask, Tensor? "
      "cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float "
      "softmax_scale, bool ieee=False, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? "
      "sinks=None) -> (Tensor out, Tensor lse)");
  // dsinks has no elements without sinks.
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? dlse, Tensor? mask_data, Tensor? mask_slots, int[] mask, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, int "
      "budget, bool batch_invariant, bool ieee=False, float softcap=0.0, Tensor? "
      "alibi_slopes=None, Tensor? sinks=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  // For eager calls that nobody differentiates and that leave scores as they are: no autograd
  // formula is registered in front of these, and the integers of a mask are a CPU tensor, which
  // passes torch as one argument.
  m.def(
      "attention_no_grad(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? mask_data, float "
      "softmax_scale, bool ieee=False, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int "
      "max_seqlen_q=0, int max_seqlen_k=0) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward_no_grad(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, Tensor? dlse, Tensor mask, Tensor? mask_data, Tensor? mask_slots, float "
      "softmax_scale, int budget, bool batch_invariant, bool ieee=False, Tensor? "
      "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int max_seqlen_q=0, int max_seqlen_k=0) -> "
      "(Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dist, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_no_grad", TORCH_BOX(&attention_no_grad));
  m.impl("attention_backward_no_grad", TORCH_BOX(&attention_backward_no_grad));
}
