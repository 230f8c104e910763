// The torch operators on a cache of keys and values. As in attention.cpp, the operators check only
// arguments that could corrupt memory.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "binding/tensors.h"

using namespace flash_dist;
using namespace flash_dist::binding;

namespace {

constexpr int64_t STEP = 8;  // 16-bit elements per load

// The cache tensors, with the types of the operator schemas.
struct Cache {
  const Tensor &k, &v;
  const MaybeTensor &seqlens, &batch_idx, &leftpad, &block_table;
  int64_t seqlen_new;
};

// Common arguments of decode and decode_no_lse.
struct Arguments {
  const Tensor& q;
  Cache cache;
  const MaybeTensor& cu_seqlens_q;
  int64_t max_seqlen_q;
  double softmax_scale;
  int64_t left, right, budget, head_dim_v;
  Scores scores = {};
};

Call make_half_call(const Tensor& q) {
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "q must be float16 or bfloat16, got ", dtype_name(dtype));
  return make_call(q, false);
}

// Checks a tensor [batch, seqlen, heads, columns]; packed tensors have no batch axis.
void check_tensor(const Tensor& t, const char* name, const Tensor& q, int axes = 4) {
  check_kind(t, name, q);
  STD_TORCH_CHECK(t.dim() == axes, name, " must have ", axes, " dimensions, got shape ",
                  show_shape(t));
  const int64_t columns = t.size(axes - 1);
  STD_TORCH_CHECK(columns > 0 && columns % STEP == 0, "the last dimension of ", name,
                  " must be a multiple of ", STEP, ", at least ", STEP, ", got ", columns);
}

void check_size(const Tensor& t, const char* name, int axis, int64_t size) {
  STD_TORCH_CHECK(t.size(axis) == size, "dimension ", axis, " of ", name, " must be ", size,
                  ", got shape ", show_shape(t));
}

// Checks that the first `axes` dimensions have the same sizes as those of `like`.
void check_sizes(const Tensor& t, const char* name, const Tensor& like, int axes) {
  for (int axis = 0; axis < axes; ++axis) check_size(t, name, axis, like.size(axis));
}

// Checks a cache tensor, which kernels use in place: a copy would double the largest tensors of
// a model.
void check_cache(const Tensor& t, const char* name, const Tensor& q) {
  check_tensor(t, name, q);
  STD_TORCH_CHECK(is_loadable(t), name,
                  " must be contiguous in its last dimension, its other strides multiples of ",
                  STEP, " elements and its address of ", ALIGNMENT, " bytes, got strides ",
                  show_numbers(t.strides()), " and an address ",
                  reinterpret_cast<uintptr_t>(t.data_ptr()) % ALIGNMENT,
                  " bytes past a multiple\n\nhint: allocate the cache by itself, or cut it from a "
                  "larger one at a multiple of ",
                  STEP, " elements");
}

void read_block_table(CacheParams& c, const Cache& cache, const Tensor& q, int64_t batch) {
  const Tensor& table = *cache.block_table;
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Int && is_on_gpu_of(table, q) &&
                      table.dim() == 2 && table.size(0) == batch && table.size(1) > 0 &&
                      (table.stride(1) == 1 || table.size(1) == 1),
                  "block_table must be int32 [batch, pages] on ", show_device(q), ", batch ", batch,
                  " and pages at least 1, contiguous in its last dimension, got ", show(table));
  STD_TORCH_CHECK(c.page % PAGE_STEP == 0, "page_size must be a multiple of ", PAGE_STEP, ", got ",
                  c.page);
  STD_TORCH_CHECK(!cache.leftpad && !cache.batch_idx,
                  cache.leftpad ? "cache_leftpad" : "cache_batch_idx",
                  " must be None with block_table, got a tensor");
  c.block_table = pointer<const int>(table);
  c.table_row = table.stride(0);
  c.capacity = to_int(table.size(1) * c.page, "keys of a row of block_table");
}

CacheParams read_cache(const Cache& cache, const Tensor& q, int64_t batch) {
  check_cache(cache.k, "k_cache", q);
  check_cache(cache.v, "v_cache", q);
  check_sizes(cache.v, "v_cache", cache.k, 3);
  CacheParams c{};
  c.k = read_view(cache.k, false);
  c.v = read_view(cache.v, false);
  c.entries = to_int(cache.k.size(0), "entries of the cache");
  c.page = c.capacity = to_int(cache.k.size(1), "keys of an entry of the cache");
  STD_TORCH_CHECK(c.entries > 0 && c.page > 0,
                  "k_cache must have at least one entry with one key, got shape ",
                  show_shape(cache.k));
  const auto read = [&](const MaybeTensor& t, const char* name) {
    return t ? read_int32(*t, name, q, batch) : nullptr;
  };
  c.cache_seqlens = read(cache.seqlens, "cache_seqlens");
  c.cache_batch_idx = read(cache.batch_idx, "cache_batch_idx");
  c.cache_leftpad = read(cache.leftpad, "cache_leftpad");
  c.seqlen_new = to_int(cache.seqlen_new, "seqlen_new");
  STD_TORCH_CHECK(cache.seqlens || c.seqlen_new == 0,
                  "cache_seqlens must be a tensor where seqlen_new is more than 0, got None and ",
                  "seqlen_new ", c.seqlen_new);
  if (cache.block_table) read_block_table(c, cache, q, batch);
  STD_TORCH_CHECK(cache.block_table || cache.batch_idx || c.entries >= batch,
                  "k_cache must have an entry for each of ", batch, " batch entries, got ",
                  c.entries);
  return c;
}

// --- decode -----------------------------------------------------------------------------------

// Fills in all parameters but lse and the views of q and out.
DecodeParams read_params(const Arguments& a, Sizes& s) {
  const Tensor &q = a.q, &k = a.cache.k, &v = a.cache.v;
  s.packed = a.cu_seqlens_q.has_value();
  const int head = s.packed ? 1 : 2;
  check_tensor(q, "q", q, head + 2);
  s.batch = to_int(s.packed ? a.cu_seqlens_q->numel() - 1 : q.size(0), "batch");
  DecodeParams p{};
  p.cache = read_cache(a.cache, q, s.batch);
  if (a.head_dim_v != 0) p.cache.v = {};
  check_size(k, "k_cache", 3, q.size(head + 1));
  set_heads(s, q.size(head), k.size(2), "k_cache");
  s.seqlen_q = to_int(q.size(head - 1), "seqlen_q");
  s.seqlen_k = p.cache.capacity;
  if (s.packed) {
    p.packing.cu_seqlens_q = read_int32(*a.cu_seqlens_q, "cu_seqlens_q", q, s.batch + int64_t{1});
    s.total_q = s.seqlen_q;
    s.seqlen_q = std::min(to_int(a.max_seqlen_q, "max_seqlen_q"), s.total_q);
  }
  s.head_dim = to_int(q.size(head + 1), "head_dim");
  const int64_t columns = a.head_dim_v != 0 ? a.head_dim_v : v.size(3);
  STD_TORCH_CHECK(0 < columns && columns <= v.size(3) && columns % STEP == 0,
                  "head_dim_v must be a multiple of ", STEP, " up to head_dim, ", v.size(3),
                  ", got ", columns);
  s.head_dim_v = to_int(columns, "head_dim_v");
  set_sizes(p, s);
  // With the largest sequence lengths, make_band() changes only sides that mask nothing anyway.
  const MaskBand band = make_band(a.left, a.right, true, INT32_MAX, INT32_MAX);
  p.left = band.left;
  p.right = band.right;
  p.bottom_right = band.bottom_right;
  p.softmax_scale = static_cast<float>(a.softmax_scale);
  p.scores = read_scores(a.scores, q, s);
  p.sinks = read_sinks(a.scores, q, s);
  return p;
}

// Allocates workspace for the lse of a call that does not return lse: the kernels always write it,
// and allocating a torch tensor would take longer.
float* allocate_unwanted(Workspace& lse, const Sizes& s, int device) {
  const int64_t bytes = s.rows() * int64_t{sizeof(float)};
  void* memory = Workspace::allocate(&lse, bytes);
  STD_TORCH_CHECK(memory != nullptr, "CUDA out of memory. flash_dist could not allocate ", bytes,
                  " bytes on GPU ", device);
  return static_cast<float*>(memory);
}

// Returns out, and stores lse unless the pointer is null.
Tensor run_decode(const Arguments& a, MaybeTensor* lse) {
  Sizes s{};
  DecodeParams p = read_params(a, s);
  const DeviceGuard guard(a.q.get_device_index());
  const Call call = make_half_call(a.q);
  const Tensor q = make_loadable(a.q);
  Tensor out = allocate_like(q, s.head_dim_v);
  if (lse != nullptr) *lse = allocate_rows(s, call.device);
  if (s.empty()) {
    fill(out, 0.0);
    if (lse != nullptr) fill_without_keys(**lse, std::nullopt, s.packed);
    return out;
  }
  Workspace workspace, unwanted;
  p.lse = lse != nullptr ? pointer<float>(**lse) : allocate_unwanted(unwanted, s, call.device);
  p.q = read_view(q, s.packed, s.group);
  p.out = read_view(out, s.packed, s.group);
  check_status(flash_dist_decode(&call, &p, a.budget, &Workspace::allocate, &workspace));
  return out;
}

OutLse decode(const Tensor& q, const Tensor& k_cache, const MaybeTensor& v_cache,
              const MaybeTensor& cache_seqlens, const MaybeTensor& cache_batch_idx,
              const MaybeTensor& cache_leftpad, const MaybeTensor& block_table,
              const MaybeTensor& cu_seqlens_q, int64_t max_seqlen_q, int64_t seqlen_new,
              double softmax_scale, int64_t left, int64_t right, int64_t budget, double softcap,
              const MaybeTensor& alibi_slopes, const MaybeTensor& sinks, int64_t head_dim_v) {
  STD_TORCH_CHECK(v_cache.has_value() == (head_dim_v == 0),
                  "v_cache must be given, or head_dim_v for values that are the first columns of "
                  "k_cache, got ",
                  v_cache ? "both" : "neither");
  const Tensor& v = v_cache ? *v_cache : k_cache;
  const Cache cache{k_cache,       v,           cache_seqlens, cache_batch_idx,
                    cache_leftpad, block_table, seqlen_new};
  MaybeTensor lse;
  const Scores scores{softcap, alibi_slopes, sinks};
  const Tensor out = run_decode({q, cache, cu_seqlens_q, max_seqlen_q, softmax_scale, left, right,
                                 budget, head_dim_v, scores},
                                &lse);
  return {out, *lse};
}

// Fast path: q has a batch axis, and rarely used arguments are left out.
Tensor decode_no_lse(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                     const MaybeTensor& cache_seqlens, const MaybeTensor& block_table,
                     double softmax_scale, int64_t left, int64_t right, int64_t seqlen_new,
                     int64_t budget) {
  const MaybeTensor none;
  const Cache cache{k_cache, v_cache, cache_seqlens, none, none, block_table, seqlen_new};
  return run_decode({q, cache, none, 0, softmax_scale, left, right, budget, 0}, nullptr);
}

// --- append -----------------------------------------------------------------------------------

// Checks the shapes of q and of the new keys and values against each other and the cache.
void check_new_keys(const Tensor& q, const Tensor& k, const Tensor& v, const Cache& cache) {
  check_size(k, "k", 0, q.size(0));
  check_size(k, "k", 2, cache.k.size(2));
  check_size(k, "k", 3, cache.k.size(3));
  check_size(q, "q", 3, cache.k.size(3));
  check_sizes(v, "v", k, 3);
  check_size(v, "v", 3, cache.v.size(3));
}

// Checks and reads rotary_cos or rotary_sin.
Tensor read_angles(const Tensor& t, const char* name, const Tensor& q) {
  STD_TORCH_CHECK(t.scalar_type() == q.scalar_type() && is_on_gpu_of(t, q) && t.dim() == 2 &&
                      t.size(0) > 0 && t.size(1) % STEP == 0 && 2 * t.size(1) <= q.size(3),
                  name, " must be ", dtype_name(q.scalar_type()),
                  " [positions, rotary_dim / 2] on ", show_device(q),
                  ", positions at least 1 and rotary_dim a multiple of ", 2 * STEP,
                  " up to head_dim, ", q.size(3), ", got ", show(t));
  return t.is_contiguous() && is_loadable(t) ? t : copy(t);
}

AppendParams read_append(const Tensor& q, const Tensor& k, const Tensor& v, const Cache& cache) {
  AppendParams p{};
  p.cache = read_cache(cache, q, q.size(0));
  check_new_keys(q, k, v, cache);
  p.k = read_view(k, false);
  p.v = read_view(v, false);
  p.batch = to_int(q.size(0), "batch");
  p.seqlen_q = to_int(q.size(1), "seqlen_q");
  p.num_heads_q = to_int(q.size(2), "num_heads_q");
  p.num_heads_kv = to_int(k.size(2), "num_heads_kv");
  p.head_dim = to_int(q.size(3), "head_dim");
  p.head_dim_v = to_int(v.size(3), "head_dim_v");
  return p;
}

Tensor append(const Tensor& given_q, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& given_k, const Tensor& given_v, const Tensor& cache_seqlens,
              const MaybeTensor& cache_batch_idx, const MaybeTensor& block_table,
              const MaybeTensor& rotary_cos, const MaybeTensor& rotary_sin, bool interleaved,
              bool advances) {
  check_tensor(given_q, "q", given_q);
  check_tensor(given_k, "k", given_q);
  check_tensor(given_v, "v", given_q);
  const bool rotates = rotary_cos.has_value();
  const Tensor q = rotates ? make_loadable(given_q) : given_q;
  const Tensor k = make_loadable(given_k), v = make_loadable(given_v);
  const MaybeTensor seqlens = cache_seqlens, none;
  const Cache cache{k_cache, v_cache, seqlens, cache_batch_idx, none, block_table, k.size(1)};
  AppendParams p = read_append(q, k, v, cache);
  p.interleaved = interleaved;
  p.advances = advances;
  check_together(rotates, "rotary_cos", rotary_sin.has_value(), "rotary_sin");
  const DeviceGuard guard(q.get_device_index());
  const Call call = make_half_call(q);
  Tensor rotated = allocate({rotates ? q.size(0) : 0, q.size(1), q.size(2), q.size(3)},
                            torch_dtype(q), call.device);
  MaybeTensor cos, sin;  // alive until the kernel is launched
  if (rotates) {
    cos = read_angles(*rotary_cos, "rotary_cos", q);
    sin = read_angles(*rotary_sin, "rotary_sin", q);
    check_sizes(*sin, "rotary_sin", *cos, 2);
    p.cos = cos->data_ptr();
    p.sin = sin->data_ptr();
    p.rotary_rows = to_int(cos->size(0), "positions");
    p.rotary_dim = to_int(2 * cos->size(1), "rotary_dim");
    p.q = read_view(q, false);
    p.rotated = read_view(rotated, false);
  }
  if (p.batch > 0) check_status(flash_dist_append(&call, &p));
  return rotated;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dist, m) {
  // Without v_cache, the first head_dim_v columns of k_cache are the values (latent keys, MLA).
  m.def(
      "decode(Tensor q, Tensor k_cache, Tensor? v_cache, Tensor? cache_seqlens, Tensor? "
      "cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, Tensor? cu_seqlens_q, SymInt "
      "max_seqlen_q, SymInt seqlen_new, float softmax_scale, SymInt left, SymInt right, int "
      "budget, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, SymInt "
      "head_dim_v=0) -> (Tensor out, Tensor lse)");
  // For eager calls without lse. Rarely used arguments are left out, because torch takes time for
  // each argument.
  m.def(
      "decode_no_lse(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? "
      "block_table, float softmax_scale, int left, int right, int seqlen_new, int budget) -> "
      "Tensor out");
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
