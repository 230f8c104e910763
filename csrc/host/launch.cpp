// The launches of the forward, the backward and the bias gradient.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/ds_scale.h"
#include "core/fwd_kvcache.h"
#include "core/max_logit.h"
#include "host/call.h"
#include "host/capi.h"
#include "host/decode.h"
#include "host/limits.h"
#include "host/plan.h"
#include "host/plan_grid.h"
#include "host/recording.h"
#include "host/scores.h"
#include "native/check.h"
#include "native/status.h"

namespace flash_dist {

namespace {

Dtype dtype_of(const Call& call) { return static_cast<Dtype>(call.dtype); }

int64_t element_bytes(const Call& call) { return is_fp32(dtype_of(call)) ? 4 : 2; }

cudaStream_t stream_of(const Call& call) { return static_cast<cudaStream_t>(call.stream); }

// Returns the bytes of one row of q and one row of v together. k has as many columns as q, and dout
// as many as v.
template <class Params>
int64_t row_bytes(const Call& call, const Params& p) {
  return element_bytes(call) * (p.head_dim + p.head_dim_v);
}

void clear(const Call& call, void* memory, int64_t bytes) {
  check_cuda(cudaMemsetAsync(memory, 0, bytes, stream_of(call)), "cudaMemsetAsync");
}

// Rejects unsupported sizes, as the binding does, for callers without the binding.
template <class Params>
void check_sizes(const Params& p) {
  const bool packed = p.packing.cu_seqlens_q != nullptr;
  const std::string problem =
      find_size_problem({p.batch, p.seqlen_q, p.seqlen_k, int64_t{p.num_heads_kv} * p.group,
                         packed ? p.total_q : 0, 0});
  if (!problem.empty()) fail(problem);
}

// Divides `groups` groups into the fewest batches of at most `most` groups each, and returns the
// size of the batches, which are nearly equal.
int equal_width(int64_t groups, int64_t most) {
  return static_cast<int>(ceil_div(groups, ceil_div(groups, most)));
}

// Returns how many of `groups` groups of blocks run side by side: one if all tiles of a group are
// equally long, otherwise the number whose data, `bytes` per group, fills half of L2, reduced so
// that batches are nearly equal. All groups run side by side in two cases: if the longest tiles of
// a second batch would start late, and if there are so few groups that many blocks of each group
// read the same data together.
template <class Params>
int heads_together(const Call& call, const Params& p, int64_t groups, int64_t bytes) {
  if (is_even(p.mask, p.packing.cu_seqlens_q != nullptr) || bytes == 0) return 1;
  const DeviceInfo& device = device_info(call.device);
  const int64_t fitting = std::max<int64_t>(device.l2_bytes / 2 / bytes, 1);
  if (groups <= std::max<int64_t>(4 * fitting, device.sm_count / 4)) {
    return static_cast<int>(groups);
  }
  return equal_width(groups, fitting);
}

// With at least this many tiles per multiprocessor, blocks take their tiles from a counter
// (tickets). With fewer tiles, setting the counter to zero takes longer than the counter saves.
constexpr int64_t TICKETED_TILES = 4;

// Tells if the blocks of a forward take their tiles from a counter in memory.
bool wants_tickets(const FwdParams& p, const KernelEntry& entry) {
  if (!entry.takes_tickets || is_even(p.mask, p.packing.cu_seqlens_q != nullptr)) return false;
  const int64_t tiles = ceil_div(p.seqlen_q, entry.block_rows) * p.batch * p.num_heads_kv * p.group;
  return tiles >= TICKETED_TILES * p.sm_count;
}

// Returns the forward kernel that also finds the largest score of each head, and whose tiles have
// the same size as those of `kernel`, so that both give the same bits. Its variant is null if there
// is none, or if `kernel` belongs to the general family.
Loaded find_with_max_logit(const Call& call, const FwdParams& p, const Loaded& kernel) {
  const KernelKey key = make_key(Role::FWD_MAX_LOGIT, dtype_of(call), {p.head_dim, p.head_dim_v});
  const Loaded found = find_kernel(call.device, key, &p);
  if (found.variant == nullptr || !kernel.variant->specific) return {};
  const bool same = found.variant->values == kernel.variant->values &&
                    found.variant->entry->block_rows == kernel.variant->entry->block_rows;
  return same ? found : Loaded{};
}

// Finds the largest score of each head in a separate launch. few_alone: see MaxLogitParams.
void run_max_logit(const Call& call, const FwdParams& p, float* max_logit, bool few_alone = false) {
  MaxLogitParams all{p, max_logit, few_alone};
  all.p.leaves_few = 0;
  const KernelKey key = make_key(Role::MAX_LOGIT, dtype_of(call), {p.head_dim, p.head_dim_v});
  launch(call.device, require_kernel(call.device, key, &all), &all, stream_of(call));
}

// Fills in the fields of FwdParams that depend on the device.
void complete(const Call& call, FwdParams& p) {
  p.heads_together = heads_together(call, p, int64_t{p.batch} * p.num_heads_kv * p.group,
                                    row_bytes(call, p) * p.seqlen_k);
  p.sm_count = device_info(call.device).sm_count;
}

// Returns the kernel of Role::FWD_BIAS if the call has a bias and that kernel supports the call,
// otherwise the kernel of Role::FWD.
Loaded find_forward(const Call& call, const FwdParams& p) {
  const auto key = [&](Role role) {
    return make_key(role, dtype_of(call), {p.head_dim, p.head_dim_v});
  };
  const Loaded own = has_bias(p) ? find_kernel(call.device, key(Role::FWD_BIAS), &p) : Loaded{};
  return own.variant != nullptr ? own : require_kernel(call.device, key(Role::FWD), &p);
}

// Runs the forward. max_logit: see MaxLogitParams; may be null.
void run_forward(const Call& call, FwdParams p, float* max_logit, Allocate allocate,
                 void* context) {
  check_sizes(p);
  const DeviceScope scope(call.device);
  p = with_scores(p);
  const bool has_few = may_have_few_queries(call, p);
  complete(call, p);
  if (has_few && p.packing.cu_seqlens_q == nullptr) {
    run_few_queries(call, p, 0, allocate, context);
    if (max_logit != nullptr) run_max_logit(call, p, max_logit);
    return;
  }
  p.leaves_few = has_few;
  Loaded kernel = find_forward(call, p);
  if (max_logit != nullptr) {
    const Loaded with_max_logit = find_with_max_logit(call, p, kernel);
    if (with_max_logit.variant != nullptr) kernel = with_max_logit;
  }
  const bool ticketed = allocate != nullptr && wants_tickets(p, *kernel.variant->entry);
  const int64_t front = ticketed ? ALIGNMENT : 0;
  void* memory = has_few    ? run_few_queries(call, p, front, allocate, context)
                 : ticketed ? allocate(context, front)
                            : nullptr;
  record_forward(p);
  const FwdMaxLogitCall all{{p, ticketed ? static_cast<unsigned*>(memory) : nullptr}, max_logit};
  if (all.tickets != nullptr) clear(call, all.tickets, sizeof(unsigned));
  launch(call.device, kernel, &all, stream_of(call));
  const bool is_found = kernel.variant->role == Role::FWD_MAX_LOGIT;
  if (max_logit != nullptr && (has_few || !is_found)) run_max_logit(call, p, max_logit, is_found);
}

void run_forward_with_dropout(const Call& call, FwdDropoutParams p, Allocate allocate,
                              void* context) {
  check_sizes(p);
  const DeviceScope scope(call.device);
  static_cast<FwdParams&>(p) = with_scores<FwdParams>(p);
  complete(call, p);
  const KernelKey key = make_key(Role::FWD_DROPOUT, dtype_of(call), {p.head_dim, p.head_dim_v});
  const Loaded kernel = require_kernel(call.device, key, &p);
  FwdDropoutCall all{p, nullptr};
  if (wants_tickets(p, *kernel.variant->entry)) {
    all.tickets = static_cast<unsigned*>(require_workspace(call, ALIGNMENT, allocate, context));
    clear(call, all.tickets, sizeof(unsigned));
  }
  record_forward(p);
  launch(call.device, kernel, &all, stream_of(call));
}

// The forward kernel computes attention to a cache only if queries fill at least this percentage of
// the tile rows of its waves; the last wave counts as full. With fewer queries the decode kernels
// are faster, because their tiles have rows of several heads and parts of the keys. The percentage
// is lower for more than 128 columns, where the decode kernels have no wgmma.
constexpr int BUSY_ROWS = 60, BUSY_ROWS_OF_MORE_COLUMNS = 20;

// Tells if the queries of a call fill tiles of `block_rows` queries, and the tiles fill the
// multiprocessors. NOTE: this affects only speed: the decode kernels give the same bits.
bool fills_tiles(const FwdParams& p, int block_rows, int columns) {
  const bool packed = p.packing.cu_seqlens_q != nullptr;
  const int64_t queries = packed ? p.total_q : int64_t{p.batch} * p.seqlen_q;
  const int64_t tiles = packed ? ceil_div(queries, block_rows) + p.batch - 1
                               : ceil_div(p.seqlen_q, block_rows) * p.batch;
  const int64_t heads = int64_t{p.num_heads_kv} * p.group;
  if (tiles * heads > INT32_MAX) return false;  // the kernel counts them in 32 bits
  const int64_t rows = ceil_div(tiles * heads, p.sm_count) * p.sm_count * block_rows;
  return 100 * queries * heads >= rows * (columns > 128 ? BUSY_ROWS_OF_MORE_COLUMNS : BUSY_ROWS);
}

// Runs a forward whose results have the same bits as attention to a cache.
void run_kvcache_forward(const Call& call, FwdParams p, Allocate allocate, void* context) {
  if (p.mask.kind != MaskKind::BAND) {
    fail("a forward with the bits of a cache must have a band as its mask, got another kind");
  }
  check_sizes(p);
  const DeviceScope scope(call.device);
  p = with_scores(p);
  const DecodeParams cache = as_cache(p);
  if (!run_fwd_kvcache(call, p, cache.cache, INT64_MAX, allocate, context)) {
    run_as_cache(call, cache, allocate, context);
  }
}

// Hands out the workspace part by part.
class Parts {
 public:
  explicit Parts(void* begin) : next_(static_cast<uint8_t*>(begin)) {}

  template <class T>
  T* take(int64_t bytes) {
    if (bytes == 0) return nullptr;
    void* begin = next_;
    next_ += aligned(bytes);
    return static_cast<T*>(begin);
  }

 private:
  uint8_t* next_;
};

int64_t workspace_bytes(const BwdPlan& plan) {
  return aligned(plan.statistics) + aligned(plan.ds) + aligned(plan.dq_accum) +
         aligned(plan.dq_turns) + aligned(plan.dk_partial) + aligned(plan.dv_partial);
}

// With at most this many waves of blocks, waiting for semaphores in the first wave takes a
// noticeable share of the time.
constexpr int64_t FEW_ROUNDS = 4;

// Dtypes FP32 and IEEE32 share the kernels without matrix products.
KernelKey key_of(const Call& call, Role role, const KernelSize& size) {
  const Dtype dtype = dtype_of(call);
  const bool multiplies = role != Role::BWD_DELTA && role != Role::BWD_REDUCE;
  return make_key(role, dtype == Dtype::IEEE32 && !multiplies ? Dtype::FP32 : dtype, size);
}

// Sets the sizes and the packing that the delta kernel reads.
void set_sizes(DeltaParams& delta, const BwdParams& p) {
  delta.batch = p.batch;
  delta.seqlen_q = p.seqlen_q;
  delta.seqlen_k = p.seqlen_k;
  delta.num_heads_kv = p.num_heads_kv;
  delta.group = p.group;
  delta.total_q = p.total_q;
  delta.total_k = p.total_k;
  delta.head_dim = p.head_dim;
  delta.head_dim_v = p.head_dim_v;
  delta.packing = p.packing;
}

class Backward {
 public:
  Backward(const Call& call, const DeltaParams& delta, const BwdParams& grads,
           const BwdOptions& options)
      : call_(call),
        delta_(delta),
        p_(with_options(call, with_scores(grads), options)),
        dropout_(options.dropout),
        whole_(may_be_whole() ? find(Role::BWD_WHOLE) : Loaded{}),
        fused_(find(Role::BWD_FUSED)),
        dkdv_(require(Role::BWD_DKDV, columns(), &p_)),
        normalizes_(is_fp32(dtype_of(call))),
        budget_(read_budget(options.budget)),
        plan_(make_plan(options.key_slots)),
        all_(p_) {}

  int64_t workspace_bytes() const { return flash_dist::workspace_bytes(plan_); }

  void run(void* workspace) {
    place(workspace);
    record_backward(p_, plan_);
    for (const BwdStep& step : plan_.steps) run(step);
  }

 private:
  static BwdParams with_options(const Call& call, BwdParams p, const BwdOptions& options) {
    p.batch_invariant = options.batch_invariant != 0;
    p.stores_ds = may_store_ds(is_built_in(flash_dist::key_of(call, Role::BWD_DQ_GEMM, {})),
                               read_budget(options.budget), p.batch_invariant);
    return p;
  }

  KernelSize columns() const { return {p_.head_dim, p_.head_dim_v}; }

  bool drops() const { return dropout_.rng_state != nullptr; }

  // Tells if the kernel for short sequences may support the call: this kernel writes no dsinks and
  // has no dropout.
  bool may_be_whole() const { return delta_.dsinks == nullptr && !drops(); }

  KernelKey key_of(Role role, const KernelSize& size) const {
    if (drops() && role == Role::BWD_FUSED) role = Role::BWD_FUSED_DROPOUT;
    if (drops() && role == Role::BWD_DKDV) role = Role::BWD_DKDV_DROPOUT;
    if (drops() && role == Role::BWD_DQ_RECOMPUTE) role = Role::BWD_DQ_RECOMPUTE_DROPOUT;
    return flash_dist::key_of(call_, role, size);
  }

  // NOTE: the kernels of dK/dV and of dQ are chosen before the workspace exists. So a family of
  // these kernels may refuse views, sizes and masks, but nothing that place() fills in.
  Loaded find(Role role) const { return find_kernel(call_.device, key_of(role, columns()), &p_); }
  Loaded require(Role role, const KernelSize& size, const void* params) const {
    return require_kernel(call_.device, key_of(role, size), params);
  }

  // Tells if a fused kernel can be used. The fused kernel must have as many columns as the kernel
  // of dK and dV, because a fused kernel with more columns is slower. If the general family
  // computes dK and dV, any fused kernel can be used.
  bool has_fused() const {
    if (fused_.variant == nullptr) return false;
    return !dkdv_.variant->specific || fused_.variant->values == dkdv_.variant->values;
  }

  // Plans the kernel for short sequences if it supports the call; else the fused kernel, if there
  // is one and storing dS is not faster; else separate kernels for dK/dV and dQ.
  BwdPlan make_plan(const int* key_slots) {
    if (whole_.variant != nullptr) return plan_whole(shape_for(*whole_.variant, key_slots));
    const BwdPlan fused = has_fused() ? plan_fused(key_slots) : BwdPlan{};
    if (fused.fused && !fused.waits) return fused;
    BwdPlan stored = plan_others(key_slots);
    if (p_.stores_ds && !stored.spill) {
      p_.stores_ds = false;  // some dK/dV kernels refuse calls that have no memory for dS
      dkdv_ = require(Role::BWD_DKDV, columns(), &p_);
      stored = plan_others(key_slots);
    }
    // Storing dS is faster than waiting for semaphores, but may take at most half of the budget.
    const bool fits = stored.spill && stored.chunks.size() == 1 && stored.ds <= budget_ / 2;
    return fused.fused && !fits ? fused : stored;
  }

  BwdPlan plan_fused(const int* key_slots) const {
    BwdKernels kernels = kernels_with(*fused_.variant);
    kernels.fused = true;
    const BwdShape shape = shape_for(*fused_.variant, key_slots);
    return plan_backward(shape, kernels, budget_, p_.batch_invariant);
  }

  BwdPlan plan_others(const int* key_slots) const {
    BwdKernels kernels = kernels_with(*dkdv_.variant);
    if (p_.stores_ds) {
      const KernelSize size = size_of(*dkdv_.variant);
      const KernelEntry& dq = *require(Role::BWD_DQ_GEMM, size, &p_).variant->entry;
      kernels.dq_rows = dq.block_rows / dq.cluster;
      kernels.dq_blocks_per_sm = dq.blocks_per_sm;
    }
    const BwdShape shape = shape_for(*dkdv_.variant, key_slots);
    return plan_backward(shape, kernels, budget_, p_.batch_invariant);
  }

  BwdKernels kernels_with(const Variant& dkdv) const {
    BwdKernels kernels{};
    kernels.sm_count = device_info(call_.device).sm_count;
    kernels.key_tile = dkdv.entry->block_rows;
    kernels.blocks_per_sm = dkdv.entry->blocks_per_sm;
    kernels.cluster = dkdv.entry->cluster;
    return kernels;
  }

  BwdShape shape_for(const Variant& dkdv, const int* key_slots) const {
    BwdShape shape{};
    shape.batch = p_.batch;
    shape.seqlen_q = p_.seqlen_q;
    shape.seqlen_k = p_.seqlen_k;
    shape.num_heads_kv = p_.num_heads_kv;
    shape.group = p_.group;
    shape.total_q = p_.packing.cu_seqlens_q != nullptr ? p_.total_q : -1;
    const KernelSize size = size_of(dkdv);
    shape.head_dim = size.head_dim;
    shape.head_dim_v = size.head_dim_v;
    shape.columns_v = p_.head_dim_v;
    shape.aligned = p_.scores.alibi != nullptr || p_.bias.data != nullptr || drops();
    shape.normalizes = normalizes_;
    shape.mask = band_of(p_.mask);
    shape.key_slots = key_slots;
    shape.per_head = p_.mask.head_planes != 0;
    return shape;
  }

  void place(void* workspace) {
    Parts parts(workspace);
    auto* statistics = parts.take<float>(plan_.statistics);
    const int64_t rows = plan_.statistics / (normalizes_ ? 3 : 2) / sizeof(float);
    p_.lse_log2 = delta_.lse_log2 = statistics;
    p_.delta = delta_.delta = statistics + rows;
    p_.normalizers = normalizes_ ? statistics + 2 * rows : nullptr;
    p_.rows_padded = delta_.rows_padded = plan_.rows_padded;
    p_.ds = parts.take<void>(plan_.ds);
    p_.ds_tiles_per_head = plan_.ds_tiles_per_head;
    p_.dq_accum = parts.take<float>(plan_.dq_accum);
    p_.dq_turns = parts.take<int>(plan_.dq_turns);
    p_.dk_partial = parts.take<float>(plan_.dk_partial);
    p_.dv_partial = parts.take<float>(plan_.dv_partial);
    p_.group_split = plan_.group_split;
    p_.query_split = plan_.query_split;
    p_.stripe_rows = plan_.stripe_rows;
    p_.first_keys_first = plan_.first_keys_first;
    all_ = p_;
  }

  void run(const BwdStep& step) {
    switch (step.role) {
      case Role::BWD_DELTA:
        return run_delta(step);
      case Role::BWD_WHOLE:
        return run_whole(step);
      case Role::BWD_FUSED:
        return run_fused(step);
      case Role::BWD_DKDV:
        return run_dkdv(step);
      case Role::BWD_DQ_GEMM:
      case Role::BWD_DQ_RECOMPUTE:
        return run_dq(step);
      case Role::BWD_REDUCE:
        return run_reduce(step);
      default:
        fail("a step of the backward must run a kernel of the backward, got ",
             role_name(step.role));
    }
  }

  void launch_kernel(const Loaded& kernel, const void* params) const {
    launch(call_.device, kernel, params, stream_of(call_));
  }

  // Launches a kernel that recomputes P, with the dropout of the call.
  void launch_with_weights(const Loaded& kernel) const {
    if (!drops()) return launch_kernel(kernel, &p_);
    const BwdDropoutParams all{p_, dropout_};
    launch_kernel(kernel, &all);
  }

  void run_delta(const BwdStep& step) {
    delta_.dq = p_.dq;
    delta_.dk = p_.dk;
    delta_.dv = p_.dv;
    set_sizes(delta_, p_);
    delta_.dq_turns = p_.dq_turns;
    delta_.turns = plan_.dq_turns / int64_t{sizeof(int)};
    launch_kernel(require(step.role, step.size, &delta_), &delta_);
  }

  void run_whole(const BwdStep& step) {
    take(plan_.chunks[step.chunk]);
    p_.heads_together = 1;
    const WholeParams all{p_, delta_.out, delta_.lse, delta_.dlse};
    launch_kernel(whole_, &all);
  }

  void run_fused(const BwdStep& step) {
    take(plan_.chunks[step.chunk]);
    p_.heads_together = fused_heads_together();
    // The delta kernel has cleared the semaphores for the first chunk.
    if (step.chunk > 0) clear(call_, p_.dq_turns, plan_.dq_turns);
    launch_with_weights(fused_);
  }

  // Returns how many groups of blocks run side by side, at least two if there are two: consecutive
  // blocks then belong to different heads and do not wait for each other's semaphores. Usually Q,
  // dO and the fp32 dQ of one query head of each of these groups take at most half of L2. If all
  // blocks start at the same queries, or if there are few waves of blocks, Q, dO and dQ of all
  // query heads of these groups take at most twice the size of L2.
  int fused_heads_together() const {
    const int64_t groups = int64_t{p_.units} * plan_.group_split;
    // With query splits, all groups of a split run side by side.
    if (plan_.query_split > 1) return static_cast<int>(groups);
    const int64_t head = p_.seqlen_q * (row_bytes(call_, p_) + sizeof(float) * p_.head_dim);
    const DeviceInfo& device = device_info(call_.device);
    const int64_t l2 = device.l2_bytes;
    const int64_t blocks = groups * ceil_div(p_.seqlen_k, fused_.variant->entry->block_rows);
    if (plan_.first_keys_first || blocks <= FEW_ROUNDS * device.sm_count) {
      const int64_t bytes = std::max<int64_t>(head * p_.members, 1);
      return even_width(groups, std::max<int64_t>(2 * l2 / bytes, 2));
    }
    const int64_t fitting = l2 / 2 / std::max<int64_t>(head, 1);
    int64_t width = 1;
    while (2 * width <= std::min(std::max<int64_t>(fitting, 2), groups)) width *= 2;
    return static_cast<int>(width);
  }

  // Returns the width of batches of at most `most` groups. Prefers a width that divides `groups`,
  // down to half of `most`; otherwise batches are nearly equal.
  static int even_width(int64_t groups, int64_t most) {
    for (int64_t width = std::min(most, groups); 2 * width >= most; --width) {
      if (groups % width == 0) return static_cast<int>(width);
    }
    return equal_width(groups, most);
  }

  void run_dkdv(const BwdStep& step) {
    take(plan_.chunks[step.chunk]);
    const int64_t rows = int64_t{p_.seqlen_q} * p_.members;
    p_.heads_together = heads_together(call_, p_, int64_t{p_.units} * plan_.group_split,
                                       row_bytes(call_, p_) * rows);
    launch_with_weights(dkdv_);
  }

  void run_dq(const BwdStep& step) {
    take(plan_.chunks[step.chunk]);
    p_.heads_together = heads_together(call_, p_, int64_t{p_.units} * p_.group_split * p_.members,
                                       row_bytes(call_, p_) * (p_.key_end - p_.key_begin));
    launch_with_weights(require(step.role, step.size, &p_));
  }

  void take(const BwdChunk& chunk) {
    p_.unit_begin = static_cast<int>(chunk.unit_begin);  // check_sizes() ensures that it fits
    p_.units = static_cast<int>(chunk.units);
    p_.key_begin = chunk.key_begin;
    p_.key_end = chunk.key_end;
    p_.dq_first = chunk.dq_first;
    p_.dq_last = chunk.dq_last;
    p_.sums_first = chunk.sums_first;
    p_.sums_last = chunk.sums_last;
    p_.sum_rows = chunk.sum_rows;
    p_.member_begin = chunk.member_begin;
    p_.members = chunk.members;
    take_queries(chunk.query_begin, chunk.query_end);
    if (p_.dq_accum != nullptr) p_.dq_accum = all_.dq_accum + chunk.dq_accum;
  }

  // Restricts the call to the queries [begin, end): pointers to rows of queries start at `begin`,
  // and the sides of a band are changed so that each query attends to the same keys as before.
  void take_queries(int begin, int end) {
    p_.seqlen_q = end - begin;
    for (View BwdParams::* view : {&BwdParams::q, &BwdParams::dout, &BwdParams::dq}) {
      const View& all = all_.*view;
      (p_.*view).data = static_cast<uint8_t*>(all.data) + element_bytes(call_) * begin * all.row;
    }
    p_.lse_log2 = all_.lse_log2 + begin;
    p_.delta = all_.delta + begin;
    p_.mask = all_.mask;
    if (begin == 0 && end == all_.seqlen_q) return;
    MaskParams& mask = p_.mask;
    const int shift = begin + (mask.bottom_right ? p_.seqlen_k - all_.seqlen_q : 0);
    if (mask.left < UNBOUNDED) mask.left -= shift;
    if (mask.right < UNBOUNDED) mask.right += shift;
    mask.bottom_right = 0;
  }

  void run_reduce(const BwdStep& step) {
    ReduceParams reduce{};
    const KernelSize& size = step.size;
    const float scale =
        dtype_of(call_) == Dtype::FP16 ? gradient_scale<Fp16>(p_.softmax_scale) : p_.softmax_scale;
    reduce.sums[0] = {p_.dk_partial, p_.dk, p_.head_dim, size.head_dim, scale};
    reduce.sums[1] = {p_.dv_partial, p_.dv, p_.head_dim_v, size.head_dim_v, 1.0f};
    reduce.splits = plan_.splits();
    reduce.batch = p_.batch;
    reduce.seqlen_k = p_.seqlen_k;
    reduce.num_heads_kv = p_.num_heads_kv;
    reduce.total_k = p_.total_k;
    reduce.packing = p_.packing;
    const KernelSize most{size.head_dim, size.head_dim};  // dV has at most as many columns as dK
    launch_kernel(require(step.role, most, &reduce), &reduce);
  }

  const Call& call_;
  DeltaParams delta_;
  BwdParams p_;
  const DropoutParams dropout_;
  const Loaded whole_, fused_;
  Loaded dkdv_;
  const bool normalizes_;  // fp32: dQ comes first, see BwdShape
  const int64_t budget_;
  const BwdPlan plan_;
  BwdParams all_;  // p_ before take_queries() restricts it to a chunk's queries
};

Role bias_gradient_role(const BiasGradientDropoutParams& all) {
  return all.dropout.rng_state == nullptr ? Role::BWD_BIAS : Role::BWD_BIAS_DROPOUT;
}

// Tells if the bias gradient kernel of a call can write the gradient itself, rounded to 16 bits.
bool rounds_bias_gradient(const Call& call, BiasGradientDropoutParams all) {
  if (all.splits != 1 || all.p.bias.is_fp32 || is_fp32(dtype_of(call))) return false;
  all.p = with_scores(all.p);
  const KernelKey key = key_of(call, bias_gradient_role(all), {all.p.head_dim, all.p.head_dim_v});
  return require_kernel(call.device, key, &all).variant->specific;
}

// Launches the delta kernel, then the bias gradient kernel, which reads delta and lse in base 2.
// The workspace holds only these statistics.
void run_bias_gradient(const Call& call, DeltaParams delta, BiasGradientCall all, Allocate allocate,
                       void* context) {
  check_sizes(all.p);
  const DeviceScope scope(call.device);
  BwdParams& p = all.p = with_scores(all.p);
  const int num_heads_q = p.num_heads_kv * p.group;
  const bool packed = p.packing.cu_seqlens_q != nullptr;
  const int64_t rows = statistics_rows(packed ? p.total_q : -1, p.batch, p.seqlen_q);
  const int64_t numbers = int64_t{packed ? 1 : p.batch} * num_heads_q * rows;
  auto* memory = static_cast<float*>(
      require_workspace(call, 2 * numbers * int64_t{sizeof(float)}, allocate, context));
  p.lse_log2 = delta.lse_log2 = memory;
  p.delta = delta.delta = memory + numbers;
  p.rows_padded = delta.rows_padded = static_cast<int>(rows);
  set_sizes(delta, p);
  delta.head_dim = delta.total_k = 0;  // no dq, dk and dv for the delta kernel to fill
  const KernelSize columns_v{p.head_dim_v, p.head_dim_v};
  const KernelKey first = key_of(call, Role::BWD_DELTA, columns_v);
  launch(call.device, require_kernel(call.device, first, &delta), &delta, stream_of(call));
  all.query_tiles = static_cast<int>(ceil_div(p.seqlen_q, BIAS_TILE));
  all.key_tiles = static_cast<int>(ceil_div(p.seqlen_k, BIAS_TILE));
  all.visits = (all.batches == 1 ? p.batch : 1) * (all.heads == 1 ? num_heads_q : 1);
  all.sm_count = device_info(call.device).sm_count;
  const KernelKey second = key_of(call, bias_gradient_role(all), {p.head_dim, p.head_dim_v});
  const Loaded kernel = require_kernel(call.device, second, &all);
  if (all.rounded != nullptr && !kernel.variant->specific) {
    fail("a gradient of a bias in 16 bits needs a kernel that rounds it");
  }
  launch(call.device, kernel, &all, stream_of(call));
}

}  // namespace

bool run_fwd_kvcache(const Call& call, FwdParams p, const CacheParams& cache, int64_t budget,
                     Allocate allocate, void* context) {
  p.sm_count = device_info(call.device).sm_count;
  p.heads_together = heads_together(call, p, int64_t{p.batch} * p.num_heads_kv * p.group,
                                    row_bytes(call, p) * p.seqlen_k);
  FwdKvcacheCall all{p, cache, nullptr, nullptr};
  const KernelKey key = make_key(Role::FWD_KVCACHE, dtype_of(call), {p.head_dim, p.head_dim_v});
  const Loaded kernel = find_kernel(call.device, key, &all);
  if (kernel.variant == nullptr) return false;
  const KernelEntry& entry = *kernel.variant->entry;
  const int columns = size_of(*kernel.variant).head_dim_v;
  if (!fills_tiles(p, entry.block_rows, columns)) return false;
  const int64_t front = wants_tickets(p, entry) ? ALIGNMENT : 0;
  const int64_t parked = parked_bytes(p.sm_count, entry.block_rows, columns);
  if (front + parked > budget) return false;
  auto* memory = static_cast<uint8_t*>(require_workspace(call, front + parked, allocate, context));
  if (front > 0) {
    all.tickets = reinterpret_cast<unsigned*>(memory);
    clear(call, all.tickets, sizeof(unsigned));
  }
  if (parked > 0) all.parked = reinterpret_cast<float4*>(memory + front);
  record_forward(p);
  launch(call.device, kernel, &all, stream_of(call));
  return true;
}

}  // namespace flash_dist

using namespace flash_dist;

int flash_dist_fwd(const Call* call, const FwdParams* params, Allocate allocate, void* context) {
  return guarded([&] {
    run_forward(*call, *params, nullptr, allocate, context);
    return 0;
  });
}

int flash_dist_fwd_max_logit(const Call* call, const FwdParams* params, float* max_logit,
                             Allocate allocate, void* context) {
  return guarded([&] {
    run_forward(*call, *params, max_logit, allocate, context);
    return 0;
  });
}

int flash_dist_fwd_dropout(const Call* call, const FwdDropoutParams* params, Allocate allocate,
                           void* context) {
  return guarded([&] {
    run_forward_with_dropout(*call, *params, allocate, context);
    return 0;
  });
}

int flash_dist_fwd_as_cache(const Call* call, const FwdParams* params, Allocate allocate,
                            void* context) {
  return guarded([&] {
    run_kvcache_forward(*call, *params, allocate, context);
    return 0;
  });
}

int flash_dist_rounds_bias_gradient(const Call* call, const BiasGradientDropoutParams* gradient) {
  return guarded([&] {
    const DeviceScope scope(call->device);
    return rounds_bias_gradient(*call, *gradient) ? 1 : 0;
  });
}

int flash_dist_bias_gradient(const Call* call, const DeltaParams* delta,
                             const BiasGradientCall* gradient, Allocate allocate, void* context) {
  return guarded([&] {
    run_bias_gradient(*call, *delta, *gradient, allocate, context);
    return 0;
  });
}

int flash_dist_bwd(const Call* call, const DeltaParams* delta, const BwdParams* grads,
                   const BwdOptions* options, Allocate allocate, void* context) {
  return guarded([&] {
    check_sizes(*grads);
    const DeviceScope scope(call->device);
    Backward backward(*call, *delta, *grads, *options);
    backward.run(require_workspace(*call, backward.workspace_bytes(), allocate, context));
    return 0;
  });
}
