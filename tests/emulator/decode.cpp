// Emulates attention to a cache of bfloat16, the forward and the backward, with csrc's host code and
// kernels: a library for ctypes. variants.inc lists the kernels.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "block.h"
#include "host/call.h"
#include "host/capi.h"
#include "native/check.h"
#include "native/status.h"
#include "plans.h"

namespace emulator {
extern flash_dist::Role role;  // of the kernel that is launched
}

#define KERNEL_VARIANT(symbol, ...) extern "C" const flash_dist::KernelEntry symbol##_entry;
#include "variants.inc"
#undef KERNEL_VARIANT

namespace flash_dist {

std::string& last_error() {
  static std::string text;
  return text;
}

namespace {

DeviceInfo device{"emulator", 80, 1, 0, 0};

const std::vector<Variant> VARIANTS = {
#define KERNEL_VARIANT(symbol, role, family, specific, plan, number, suffix, ptx, ...) \
  {#symbol, Role::role, Family::family, specific != 0,       plan,                     \
   number,  suffix,     ptx != 0,       Values{__VA_ARGS__}, &symbol##_entry},
#include "variants.inc"
#undef KERNEL_VARIANT
};

}  // namespace

const DeviceInfo& device_info(int) { return device; }

DeviceScope::DeviceScope(int) {}
DeviceScope::~DeviceScope() {}

// Prefers the GPU's own family if it supports the arguments. Within a family, takes the largest
// tile that fits in shared memory, with the fewest sufficient columns.
Loaded find_kernel(int, const KernelKey& key, const void* params) {
  const Variant* best = nullptr;
  const auto rank = [](const Variant* v) {
    return std::make_tuple(v->specific, -size_of(*v).head_dim, v->plan);
  };
  for (const Variant& v : VARIANTS) {
    const auto refuses = v.entry->refuses;
    if (params != nullptr && refuses != nullptr && refuses(params)) continue;
    const bool holds = v.role == key.role && v.number == device.compute_capability &&
                       v.values[DTYPE_AXIS] == key.values[DTYPE_AXIS] &&
                       v.values == smallest_holding({v.values}, key.values) &&
                       smem_plan_bytes(v.plan) <= device.smem_limit;
    if (holds && (best == nullptr || rank(best) < rank(&v))) best = &v;
  }
  return {best, 80, 80};
}

bool is_built_in(const KernelKey& key) {
  return std::any_of(VARIANTS.begin(), VARIANTS.end(),
                     [&](const Variant& v) { return v.role == key.role; });
}

Loaded require_kernel(int index, const KernelKey& key, const void* params) {
  const Loaded found = find_kernel(index, key, params);
  if (found.variant == nullptr) fail("no kernel ", role_name(key.role));
  return found;
}

void launch(int, const Loaded& kernel, const void* params, cudaStream_t stream) {
  const KernelEntry& entry = *kernel.variant->entry;
  emulator::role = kernel.variant->role;
  check_cuda(entry.launch(entry, params, stream), kernel.variant->symbol);
}

}  // namespace flash_dist

namespace {

struct Memory {
  std::vector<uint8_t> bytes;
  static void* allocate(void* context, int64_t bytes) {
    auto& own = *static_cast<Memory*>(context);
    own.bytes.assign(bytes + 256, 0xff);  // NaN
    auto* data = own.bytes.data();
    data += (256 - reinterpret_cast<uintptr_t>(data) % 256) % 256;
    emulator::declare(data, bytes, true);
    return data;
  }
};

template <class Emulated>  // EmulatedCall, EmulatedForward or EmulatedBackward
void set_device(const Emulated& c) {
  flash_dist::device.compute_capability = static_cast<int>(c.capability);
  flash_dist::device.sm_count = static_cast<int>(c.sm_count);
  flash_dist::device.smem_limit = static_cast<int>(c.smem_limit);
}

// Fills in the sizes and the mask of a call, except its lists.
template <class Params, class Emulated>  // of a forward or a backward
void fill_call(Params& p, const Emulated& c) {
  using namespace flash_dist;
  p.batch = static_cast<int>(c.batch);
  p.seqlen_q = static_cast<int>(c.seqlen_q);
  p.seqlen_k = static_cast<int>(c.seqlen_k);
  p.total_q = static_cast<int>(c.total_q);
  p.total_k = static_cast<int>(c.total_k);
  p.num_heads_kv = static_cast<int>(c.num_heads_kv);
  p.group = static_cast<int>(c.num_heads_q / c.num_heads_kv);
  p.head_dim = static_cast<int>(c.head_dim);
  p.head_dim_v = static_cast<int>(c.head_dim_v);
  p.softmax_scale = static_cast<float>(c.softmax_scale);
  p.packing = {static_cast<const int*>(c.cu_q), static_cast<const int*>(c.cu_k)};
  MaskParams& mask = p.mask;
  mask.kind = static_cast<MaskKind>(c.mask_kind);
  mask.left = static_cast<int>(c.left);
  mask.right = static_cast<int>(c.right);
  mask.bottom_right = 1;
  mask.batch_planes = static_cast<int>(c.mask_batches > 1 ? c.mask_heads : 0);
  mask.head_planes = c.mask_heads > 1 ? 1 : 0;
  mask.query_tiles = static_cast<int>((c.seqlen_q + 63) / 64);
  mask.key_tiles = static_cast<int>((c.seqlen_k + 63) / 64);
  mask.key_bounds = static_cast<const int2*>(c.key_bounds);
  mask.rows = static_cast<const int2*>(c.rows);
  mask.query_ranges = static_cast<const int4*>(c.query_ranges);
  mask.bits = static_cast<const uint2*>(c.bits);
}

}  // namespace

// Arguments of a call. tests/unit/made/emulator.py has the same layout.
struct EmulatedCall {
  int64_t batch, seqlen_q, num_heads_q, num_heads_kv, head_dim, head_dim_v;
  int64_t entries, page, pages;  // pages: per row of block_table; 0: no table
  int64_t left, right, budget, capability, sm_count, smem_limit, seed;
  double softmax_scale, softcap;
  void *q, *k, *v, *out, *lse, *seqlens, *table, *alibi, *sinks;
};

extern "C" const char* emulated_error() { return flash_dist::last_error().c_str(); }

// Returns the number of bank conflicts of ldmatrix, or -1 for an error.
extern "C" int64_t emulate_decode(const EmulatedCall* call) {
  using namespace flash_dist;
  const EmulatedCall& c = *call;
  set_device(c);
  const int64_t group = c.num_heads_q / c.num_heads_kv;
  const auto view = [](void* data, int64_t rows, int64_t heads, int64_t columns, int64_t members) {
    return View{data, rows * heads * columns, heads * columns, members * columns, columns};
  };
  DecodeParams p{};
  p.q = view(c.q, c.seqlen_q, c.num_heads_q, c.head_dim, group);
  p.out = view(c.out, c.seqlen_q, c.num_heads_q, c.head_dim_v, group);
  p.lse = static_cast<float*>(c.lse);
  p.cache.k = view(c.k, c.page, c.num_heads_kv, c.head_dim, 1);
  p.cache.v = c.v == c.k ? View{} : view(c.v, c.page, c.num_heads_kv, c.head_dim_v, 1);
  p.cache.cache_seqlens = static_cast<const int*>(c.seqlens);
  p.cache.block_table = static_cast<const int*>(c.table);
  p.cache.table_row = c.pages;
  p.cache.entries = static_cast<int>(c.entries);
  p.cache.page = static_cast<int>(c.page);
  p.cache.capacity = static_cast<int>(c.pages > 0 ? c.pages * c.page : c.page);
  p.batch = static_cast<int>(c.batch);
  p.seqlen_q = static_cast<int>(c.seqlen_q);
  p.num_heads_kv = static_cast<int>(c.num_heads_kv);
  p.group = static_cast<int>(group);
  p.head_dim = static_cast<int>(c.head_dim);
  p.head_dim_v = static_cast<int>(c.head_dim_v);
  p.left = static_cast<int>(c.left);
  p.right = static_cast<int>(c.right);
  p.bottom_right = 1;
  p.softmax_scale = static_cast<float>(c.softmax_scale);
  p.scores.softcap = static_cast<float>(c.softcap);
  p.scores.alibi = static_cast<const float*>(c.alibi);
  p.sinks = static_cast<const float*>(c.sinks);

  emulator::seed(static_cast<unsigned>(c.seed));
  emulator::forget_declared();
  const int64_t rows = c.batch * c.seqlen_q * c.num_heads_q;
  const int64_t keys = c.entries * c.page * c.num_heads_kv;
  emulator::declare(c.q, rows * c.head_dim * 2, false);
  emulator::declare(c.k, keys * c.head_dim * 2, false);
  if (c.v != c.k) emulator::declare(c.v, keys * c.head_dim_v * 2, false);
  emulator::declare(c.out, rows * c.head_dim_v * 2, true);
  const Call where{0, nullptr, static_cast<int>(Dtype::BF16)};
  Memory memory;
  const int status = flash_dist_decode(&where, &p, c.budget, &Memory::allocate, &memory);
  return status == 0 ? emulator::bank_conflicts() : -1;
}

// Arguments of a forward or a backward. tests/unit/made/emulator.py has the same layout. Packed: cu_q
// and cu_k are set, batch is the number of documents, and seqlens are the longest.
struct EmulatedNumbers {
  int64_t batch, seqlen_q, seqlen_k, total_q, total_k, num_heads_q, num_heads_kv, head_dim,
      head_dim_v;
  int64_t left, right, capability, sm_count, smem_limit, seed, budget;
  int64_t mask_kind, mask_batches, mask_heads;
  double softmax_scale;
};

struct EmulatedBias {
  void* data;
  int64_t strides[4], is_fp32, in_pairs, bytes;
};

struct EmulatedForward : EmulatedNumbers {
  void *q, *k, *v, *out, *lse, *cu_q, *cu_k, *sinks, *max_logit;
  void *key_bounds, *rows, *query_ranges, *list_begin, *list_entries, *bits;  // arrays of a mask
  EmulatedBias bias;
};

// Begins a forward or a backward: fills in its numbers, its mask without lists, and its bias. The
// kernels may touch only memory that is declared from here on.
template <class Params, class Emulated>
void begin(Params& p, const Emulated& c) {
  set_device(c);
  emulator::seed(static_cast<unsigned>(c.seed));
  emulator::forget_declared();
  fill_call(p, c);
  const EmulatedBias& bias = c.bias;
  p.bias = {bias.data,
            bias.strides[0],
            bias.strides[1],
            bias.strides[2],
            bias.strides[3],
            static_cast<int>(bias.is_fp32),
            static_cast<int>(bias.in_pairs)};
  // A word of 4 bytes that is read may have one number of the bias and one beside it.
  const auto begin = reinterpret_cast<uintptr_t>(bias.data), end = begin + bias.bytes;
  const uintptr_t before = begin / 4 * 4, behind = (end + 3) / 4 * 4;
  emulator::declare(reinterpret_cast<const void*>(before), behind - before, false);
}

// Declares a tensor of the queries or of the keys, and returns its view.
template <class Emulated>
flash_dist::View declare(const Emulated& c, void* data, bool of_queries, int64_t columns,
                         bool may_write) {
  const bool packed = c.cu_q != nullptr;
  const int64_t rows = of_queries ? c.seqlen_q : c.seqlen_k;
  const int64_t total = packed ? of_queries ? c.total_q : c.total_k : c.batch * rows;
  const int64_t heads = of_queries ? c.num_heads_q : c.num_heads_kv;
  const int64_t group = of_queries ? c.num_heads_q / c.num_heads_kv : 1;
  emulator::declare(data, total * heads * columns * 2, may_write);
  return {data, packed ? 0 : rows * heads * columns, heads * columns, group * columns, columns};
}

// Returns 0, or -1 for an error.
extern "C" int64_t emulate_forward(const EmulatedForward* call) {
  using namespace flash_dist;
  const EmulatedForward& c = *call;
  FwdParams p{};
  begin(p, c);
  p.q = declare(c, c.q, true, c.head_dim, false);
  p.k = declare(c, c.k, false, c.head_dim, false);
  p.v = declare(c, c.v, false, c.head_dim_v, false);
  p.out = declare(c, c.out, true, c.head_dim_v, true);
  p.lse = static_cast<float*>(c.lse);
  p.sinks = static_cast<const float*>(c.sinks);
  MaskParams& mask = p.mask;
  mask.by_query[1] = {static_cast<const int*>(c.list_begin),
                      static_cast<const int4*>(c.list_entries), nullptr};
  const Call where{0, nullptr, static_cast<int>(Dtype::BF16)};
  Memory memory;
  auto* max_logit = static_cast<float*>(c.max_logit);
  const int status = max_logit == nullptr ? flash_dist_fwd(&where, &p, &Memory::allocate, &memory)
                                          : flash_dist_fwd_max_logit(&where, &p, max_logit,
                                                                     &Memory::allocate, &memory);
  return status == 0 ? 0 : -1;
}

// Arguments of a backward, with the conventions of EmulatedForward.
struct EmulatedBackward : EmulatedNumbers {
  void *q, *k, *v, *out, *lse, *dout, *dq, *dk, *dv, *cu_q, *cu_k;
  void *key_bounds, *rows, *query_ranges, *key_ranges, *key_slots;
  void* lists[4][3];  // by_query, then by_key, for 64 and for 128 rows: begin, entries, slots
  void* bits;
  EmulatedBias bias;
};

// Fills in what a backward and the gradient of a bias share.
void begin_backward(flash_dist::BwdParams& p, flash_dist::DeltaParams& delta,
                    const EmulatedBackward& c) {
  begin(p, c);
  p.q = declare(c, c.q, true, c.head_dim, false);
  p.k = declare(c, c.k, false, c.head_dim, false);
  p.v = declare(c, c.v, false, c.head_dim_v, false);
  p.dout = declare(c, c.dout, true, c.head_dim_v, false);
  delta.out = declare(c, c.out, true, c.head_dim_v, false);
  delta.dout = p.dout;
  delta.lse = static_cast<const float*>(c.lse);
  flash_dist::MaskParams& mask = p.mask;
  mask.key_ranges = static_cast<const int2*>(c.key_ranges);
  mask.key_slots = static_cast<const int*>(c.key_slots);
  for (int i = 0; i < 4; ++i) {
    (i < 2 ? mask.by_query : mask.by_key)[i % 2] = {static_cast<const int*>(c.lists[i][0]),
                                                    static_cast<const int4*>(c.lists[i][1]),
                                                    static_cast<const int2*>(c.lists[i][2])};
  }
}

// Returns the bytes of the workspace, or -1 for an error.
extern "C" int64_t emulate_backward(const EmulatedBackward* call) {
  using namespace flash_dist;
  const EmulatedBackward& c = *call;
  BwdParams p{};
  DeltaParams delta{};
  begin_backward(p, delta, c);
  delta.dq = p.dq = declare(c, c.dq, true, c.head_dim, true);
  delta.dk = p.dk = declare(c, c.dk, false, c.head_dim, true);
  delta.dv = p.dv = declare(c, c.dv, false, c.head_dim_v, true);
  const BwdOptions options{c.budget, 0, c.mask_kind == 0 ? nullptr : p.mask.key_slots};
  const Call where{0, nullptr, static_cast<int>(Dtype::BF16)};
  Memory memory;
  const int status = flash_dist_bwd(&where, &delta, &p, &options, &Memory::allocate, &memory);
  return status == 0 ? static_cast<int64_t>(memory.bytes.size()) : -1;
}

// The gradient of a bias: dq, dk and dv are null. batches and heads: of the bias.
struct EmulatedBiasGradient : EmulatedBackward {
  void* sums;  // [splits, batches, heads, seqlen_q, seqlen_k], in bf16 if `rounds`, else in fp32
  int64_t bytes, batches, heads, splits, rounds;
};

// Returns 0, or -1 for an error.
extern "C" int64_t emulate_bias_gradient(const EmulatedBiasGradient* call) {
  using namespace flash_dist;
  const EmulatedBiasGradient& c = *call;
  BiasGradientCall all{};
  DeltaParams delta{};
  begin_backward(all.p, delta, c);
  emulator::declare(c.sums, c.bytes, true);
  all.batches = static_cast<int>(c.batches);
  all.heads = static_cast<int>(c.heads);
  all.splits = static_cast<int>(c.splits);
  const Call where{0, nullptr, static_cast<int>(Dtype::BF16)};
  if (flash_dist_rounds_bias_gradient(&where, &all) != c.rounds) return -1;
  (c.rounds ? all.rounded : reinterpret_cast<void*&>(all.parts)) = c.sums;
  Memory memory;
  return flash_dist_bias_gradient(&where, &delta, &all, &Memory::allocate, &memory);
}
