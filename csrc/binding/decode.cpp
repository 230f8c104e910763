// The operators on a cache of keys and values. As in api.cpp only what would corrupt memory is
// checked here.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
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

namespace {

using flash_dist::UNBOUNDED;
using namespace flash_dist::binding;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t STEP = 8;  // elements of 16 bits that are loaded at once

// Of a call with such queries.
flash_dist::Call make_half_call(const Tensor& q) {
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "q must be float16 or bfloat16, got ", dtype_name(q.scalar_type()));
  return make_call(q, false);
}

// [batch, seqlen, heads, columns], packed without batch.
void check_tensor(const Tensor& t, const Tensor& q, const char* name, int axes = 4) {
  check_kind(t, q, name);
  STD_TORCH_CHECK(t.dim() == axes, name, " must have ", axes, " dimensions, got shape ",
                  show_shape(t));
  const int64_t columns = t.size(axes - 1);
  STD_TORCH_CHECK(columns > 0 && columns % STEP == 0, "the last dimension of ", name,
                  " must be a multiple of ", STEP, ", at least ", STEP, ", got ", columns);
}

// Caches are read and written in place: a copy would double the largest tensors that a model has.
void check_cache(const Tensor& t, const Tensor& q, const char* name) {
  check_tensor(t, q, name);
  STD_TORCH_CHECK(is_loadable(t), name,
                  " must be contiguous in its last dimension, its other strides multiples of ",
                  STEP, " elements and its address of ", ALIGNMENT, " bytes, got strides ",
                  show_numbers(t.strides()), " and an address ",
                  reinterpret_cast<uintptr_t>(t.data_ptr()) % ALIGNMENT,
                  " bytes past a multiple\n\nhint: allocate the cache by itself, or cut it from a "
                  "larger one at "
                  "a multiple of ",
                  STEP, " elements");
}

void check_size(const Tensor& t, int axis, int64_t size, const char* name) {
  STD_TORCH_CHECK(t.size(axis) == size, "dimension ", axis, " of ", name, " must be ", size,
                  ", got shape ", show_shape(t));
}

flash_dist::View view(const Tensor& t, int group) {
  const auto strides = t.strides();
  const int row = t.dim() == 4 ? 1 : 0;
  return {t.data_ptr(), row == 0 ? 0 : strides[0], strides[row], strides[row + 1] * group,
          strides[row + 1]};
}

const int* numbers(const MaybeTensor& t, const Tensor& q, int64_t count, const char* name) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int && is_on_gpu_of(*t, q) && t->dim() == 1 &&
                      t->is_contiguous() && t->numel() == count,
                  name, " must be contiguous int32 [", count, "] on ", show_device(q), ", got ",
                  show(*t));
  return static_cast<const int*>(t->data_ptr());
}

const float* floats(const Tensor& t, const Tensor& q, int64_t count, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && is_on_gpu_of(t, q) && t.is_contiguous() &&
                      t.numel() == count,
                  name, " must be contiguous float32 with ", count, " numbers on ", show_device(q),
                  ", got ", show(t));
  return static_cast<const float*>(t.data_ptr());
}

flash_dist::CacheParams read_cache(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                   const MaybeTensor& cache_seqlens,
                                   const MaybeTensor& cache_batch_idx,
                                   const MaybeTensor& cache_leftpad, const MaybeTensor& block_table,
                                   int64_t batch, int64_t seqlen_new) {
  check_cache(k_cache, q, "k_cache");
  check_cache(v_cache, q, "v_cache");
  for (int axis = 0; axis < 3; ++axis) check_size(v_cache, axis, k_cache.size(axis), "v_cache");
  flash_dist::CacheParams c{};
  c.k = view(k_cache, 1);
  c.v = view(v_cache, 1);
  c.entries = to_int(k_cache.size(0), "entries of the cache");
  c.page = to_int(k_cache.size(1), "keys of an entry of the cache");
  STD_TORCH_CHECK(c.entries > 0 && c.page > 0,
                  "k_cache must have at least one entry with one key, got shape ",
                  show_shape(k_cache));
  c.capacity = c.page;
  c.cache_seqlens = numbers(cache_seqlens, q, batch, "cache_seqlens");
  c.cache_batch_idx = numbers(cache_batch_idx, q, batch, "cache_batch_idx");
  c.cache_leftpad = numbers(cache_leftpad, q, batch, "cache_leftpad");
  c.seqlen_new = to_int(seqlen_new, "seqlen_new");
  STD_TORCH_CHECK(cache_seqlens || seqlen_new == 0,
                  "cache_seqlens must be a tensor where seqlen_new is more than 0, got None and ",
                  "seqlen_new ", seqlen_new);
  if (block_table) {
    const Tensor& table = *block_table;
    STD_TORCH_CHECK(table.scalar_type() == ScalarType::Int && is_on_gpu_of(table, q) &&
                        table.dim() == 2 && table.size(0) == batch && table.size(1) > 0 &&
                        (table.stride(1) == 1 || table.size(1) == 1),
                    "block_table must be int32 [batch, pages] on ", show_device(q), ", batch ",
                    batch, " and pages at least 1, contiguous in its last dimension, got ",
                    show(table));
    STD_TORCH_CHECK(c.page % flash_dist::PAGE_STEP == 0, "page_size must be a multiple of ",
                    flash_dist::PAGE_STEP, ", got ", c.page);
    STD_TORCH_CHECK(!cache_leftpad && !cache_batch_idx,
                    cache_leftpad ? "cache_leftpad" : "cache_batch_idx",
                    " must be None with block_table, got a tensor");
    c.block_table = static_cast<const int*>(table.data_ptr());
    c.table_row = table.stride(0);
    c.capacity = to_int(table.size(1) * c.page, "keys of a row of block_table");
  } else if (!cache_batch_idx) {
    STD_TORCH_CHECK(c.entries >= batch, "k_cache must have an entry for each of ", batch,
                    " batch entries, got ", c.entries);
  }
  return c;
}

int side(int64_t width) {
  return width < 0 || width >= UNBOUNDED ? UNBOUNDED : static_cast<int>(width);
}

// Heads of q, whose dimension is `axis`, and of the cache.
void set_heads(flash_dist::DecodeParams& p, const Tensor& q, const Tensor& k_cache, int axis) {
  const int64_t heads_q = q.size(axis), heads_kv = k_cache.size(2);
  STD_TORCH_CHECK(heads_kv > 0 && heads_q % heads_kv == 0,
                  "num_heads_kv must divide num_heads_q, got ", heads_kv, " (k_cache) and ",
                  heads_q, " (q)");
  p.num_heads_kv = to_int(heads_kv, "num_heads_kv");
  p.group = to_int(heads_q / heads_kv, "heads per kv head");
}

bool has_no_query(const flash_dist::DecodeParams& p) { return p.batch == 0 || p.seqlen_q == 0; }

std::vector<int64_t> shape_of_lse(const flash_dist::DecodeParams& p) {
  const int64_t heads_q = int64_t{p.num_heads_kv} * p.group;
  if (p.packing.cu_seqlens_q != nullptr) return {heads_q, p.total_q};
  return {p.batch, heads_q, p.seqlen_q};
}

// out of what p describes, but for it and the queries.
Tensor make_out(const Tensor& given_q, flash_dist::DecodeParams& p, const flash_dist::Call& call,
                int64_t budget) {
  const int64_t heads_q = int64_t{p.num_heads_kv} * p.group;
  std::vector<int64_t> shape{p.total_q, heads_q, p.head_dim_v};
  if (p.packing.cu_seqlens_q == nullptr) shape = {p.batch, p.seqlen_q, heads_q, p.head_dim_v};
  const Tensor q = make_loadable(given_q);
  Tensor out = allocate(shape, torch_dtype(q), call.device);
  if (has_no_query(p)) {
    fill(out, 0.0);
    return out;
  }
  p.q = view(q, p.group);
  p.out = view(out, p.group);
  Workspace workspace;
  check_status(flash_dist_decode(&call, &p, budget, &Workspace::allocate, &workspace));
  return out;
}

// out and lse of what p describes, but for these and the queries.
std::tuple<Tensor, Tensor> attend(const Tensor& q, flash_dist::DecodeParams p, int64_t budget) {
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const flash_dist::Call call = make_half_call(q);
  Tensor lse = allocate(shape_of_lse(p), aoti_torch_dtype_float32(), call.device);
  p.lse = static_cast<float*>(lse.data_ptr());
  Tensor out = make_out(q, p, call, budget);
  if (has_no_query(p)) fill(lse, -std::numeric_limits<double>::infinity());
  return {out, lse};
}

// out alone: lse, which kernels write in any case, is not worth a tensor.
Tensor attend_no_lse(const Tensor& q, flash_dist::DecodeParams p, int64_t budget) {
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const flash_dist::Call call = make_half_call(q);
  Workspace lse;
  if (!has_no_query(p)) {
    const int64_t rows = int64_t{p.batch} * p.seqlen_q * p.num_heads_kv * p.group;
    const int64_t bytes = rows * static_cast<int64_t>(sizeof(float));
    p.lse = static_cast<float*>(Workspace::allocate(&lse, bytes));
    STD_TORCH_CHECK(p.lse != nullptr, "CUDA out of memory. flash_dist could not allocate ", bytes,
                    " bytes on GPU ", call.device);
  }
  return make_out(q, p, call, budget);
}

// All but what becomes of scores, out, lse and the view of q.
flash_dist::DecodeParams read_params(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const MaybeTensor& cache_seqlens,
    const MaybeTensor& cache_batch_idx, const MaybeTensor& cache_leftpad,
    const MaybeTensor& block_table, const MaybeTensor& cu_seqlens_q, int64_t max_seqlen_q,
    int64_t seqlen_new, double softmax_scale, int64_t left, int64_t right, int64_t head_dim_v) {
  const bool packed = cu_seqlens_q.has_value();
  const int row = packed ? 0 : 1;
  check_tensor(q, q, "q", row + 3);
  flash_dist::DecodeParams p{};
  p.batch = to_int(packed ? cu_seqlens_q->numel() - 1 : q.size(0), "batch");
  p.cache = read_cache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad,
                       block_table, p.batch, seqlen_new);
  check_size(k_cache, 3, q.size(row + 2), "k_cache");
  set_heads(p, q, k_cache, row + 1);
  p.seqlen_q = to_int(q.size(row), "seqlen_q");
  if (packed) {
    p.packing.cu_seqlens_q = numbers(cu_seqlens_q, q, p.batch + int64_t{1}, "cu_seqlens_q");
    p.total_q = p.seqlen_q;
    p.seqlen_q = std::min(to_int(max_seqlen_q, "max_seqlen_q"), p.total_q);
  }
  p.head_dim = to_int(q.size(row + 2), "head_dim");
  const int64_t columns = head_dim_v != 0 ? head_dim_v : v_cache.size(3);
  STD_TORCH_CHECK(0 < columns && columns <= v_cache.size(3) && columns % STEP == 0,
                  "head_dim_v must be a multiple of ", STEP, " up to head_dim, ", v_cache.size(3),
                  ", got ", columns);
  p.head_dim_v = to_int(columns, "head_dim_v");
  p.left = side(left);
  p.right = side(right);
  p.bottom_right = true;
  p.softmax_scale = static_cast<float>(softmax_scale);
  return p;
}

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k_cache,
                                  const MaybeTensor& given_v, const MaybeTensor& cache_seqlens,
                                  const MaybeTensor& cache_batch_idx,
                                  const MaybeTensor& cache_leftpad, const MaybeTensor& block_table,
                                  const MaybeTensor& cu_seqlens_q, int64_t max_seqlen_q,
                                  int64_t seqlen_new, double softmax_scale, int64_t left,
                                  int64_t right, int64_t budget, double softcap,
                                  const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
                                  int64_t head_dim_v) {
  STD_TORCH_CHECK(given_v.has_value() == (head_dim_v == 0),
                  "v_cache must be given, or head_dim_v for values that are the first columns of "
                  "k_cache, got ",
                  given_v ? "both" : "neither");
  const Tensor& v_cache = given_v ? *given_v : k_cache;
  flash_dist::DecodeParams p =
      read_params(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
                  cu_seqlens_q, max_seqlen_q, seqlen_new, softmax_scale, left, right, head_dim_v);
  const int64_t heads_q = int64_t{p.num_heads_kv} * p.group;
  p.scores.softcap = static_cast<float>(softcap);
  if (alibi_slopes) {
    const bool shared = alibi_slopes->dim() == 1;
    p.scores.alibi = floats(*alibi_slopes, q, shared ? heads_q : heads_q * p.batch, "alibi_slopes");
    p.scores.alibi_batch = shared ? 0 : static_cast<int>(heads_q);
  }
  if (sinks) p.sinks = floats(*sinks, q, heads_q, "sinks");
  return attend(q, p, budget);
}

// Of queries with a batch axis, and without what most calls lack.
Tensor decode_no_lse(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                     const MaybeTensor& cache_seqlens, const MaybeTensor& block_table,
                     double softmax_scale, int64_t left, int64_t right, int64_t seqlen_new,
                     int64_t budget) {
  return attend_no_lse(
      q,
      read_params(q, k_cache, v_cache, cache_seqlens, std::nullopt, std::nullopt, block_table,
                  std::nullopt, 0, seqlen_new, softmax_scale, left, right, 0),
      budget);
}

Tensor read_angles(const Tensor& t, const Tensor& q, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == q.scalar_type() && is_on_gpu_of(t, q) && t.dim() == 2 &&
                      t.size(0) > 0 && t.size(1) % STEP == 0 && 2 * t.size(1) <= q.size(3),
                  name, " must be ", dtype_name(q.scalar_type()),
                  " [positions, rotary_dim / 2] on ", show_device(q),
                  ", positions at least 1 and rotary_dim a multiple of ", 2 * STEP,
                  " up to head_dim, ", q.size(3), ", got ", show(t));
  return t.is_contiguous() && is_loadable(t) ? t : copy(t);
}

Tensor append(Tensor given_q, Tensor k_cache, Tensor v_cache, Tensor given_k, Tensor given_v,
              Tensor cache_seqlens, MaybeTensor cache_batch_idx, MaybeTensor block_table,
              MaybeTensor rotary_cos, MaybeTensor rotary_sin, bool interleaved, bool advances) {
  check_tensor(given_q, given_q, "q");
  check_tensor(given_k, given_q, "k");
  check_tensor(given_v, given_q, "v");
  const bool rotates = rotary_cos.has_value();
  const Tensor q = rotates ? make_loadable(given_q) : given_q;
  const Tensor k = make_loadable(given_k), v = make_loadable(given_v);
  flash_dist::AppendParams p{};
  p.cache = read_cache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, std::nullopt,
                       block_table, q.size(0), k.size(1));
  check_size(k, 0, q.size(0), "k");
  check_size(k, 2, k_cache.size(2), "k");
  check_size(k, 3, k_cache.size(3), "k");
  check_size(q, 3, k_cache.size(3), "q");
  for (int axis = 0; axis < 3; ++axis) check_size(v, axis, k.size(axis), "v");
  check_size(v, 3, v_cache.size(3), "v");
  p.k = view(k, 1);
  p.v = view(v, 1);
  p.batch = to_int(q.size(0), "batch");
  p.seqlen_q = to_int(q.size(1), "seqlen_q");
  p.num_heads_q = to_int(q.size(2), "num_heads_q");
  p.num_heads_kv = to_int(k.size(2), "num_heads_kv");
  p.head_dim = to_int(q.size(3), "head_dim");
  p.head_dim_v = to_int(v.size(3), "head_dim_v");
  p.interleaved = interleaved;
  p.advances = advances;
  check_together(rotates, rotary_sin.has_value(), "rotary_cos", "rotary_sin");
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const flash_dist::Call call = make_half_call(q);
  const std::vector<int64_t> shape{rotates ? q.size(0) : 0, q.size(1), q.size(2), q.size(3)};
  Tensor rotated = allocate(shape, torch_dtype(q), call.device);
  std::optional<Tensor> cos, sin;  // alive until the kernel is launched
  if (rotates) {
    cos = read_angles(*rotary_cos, q, "rotary_cos");
    sin = read_angles(*rotary_sin, q, "rotary_sin");
    for (int axis = 0; axis < 2; ++axis) check_size(*sin, axis, cos->size(axis), "rotary_sin");
    p.cos = cos->data_ptr();
    p.sin = sin->data_ptr();
    p.rotary_rows = to_int(cos->size(0), "positions");
    p.rotary_dim = to_int(2 * cos->size(1), "rotary_dim");
    p.q = view(q, 1);
    p.rotated = view(rotated, 1);
  }
  if (p.batch > 0) check_status(flash_dist_append(&call, &p));
  return rotated;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dist, m) {
  // Without v_cache values are the first head_dim_v columns of k_cache (latent keys, MLA).
  m.def(
      "decode(Tensor q, Tensor k_cache, Tensor? v_cache, Tensor? cache_seqlens, Tensor? "
      "cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, Tensor? cu_seqlens_q, SymInt "
      "max_seqlen_q, SymInt seqlen_new, float softmax_scale, SymInt left, SymInt right, int "
      "budget, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, SymInt "
      "head_dim_v=0) -> (Tensor out, Tensor lse)");
  // For eager calls that want no lse, and nothing that most calls lack: torch takes time for each.
  m.def(
      "decode_no_lse(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? "
      "block_table, float softmax_scale, int left, int right, int seqlen_new, int budget) -> "
      "Tensor "
      "out");
  m.def(
      "append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor "
      "cache_seqlens, Tensor? cache_batch_idx, Tensor? block_table, Tensor? rotary_cos, Tensor? "
      "rotary_sin, bool interleaved, bool advances) -> Tensor rotated");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dist, CUDA, m) {
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("decode_no_lse", TORCH_BOX(&decode_no_lse));
  m.impl("append", TORCH_BOX(&append));
}
