// The launches behind attention to a cache.
#include <algorithm>
#include <cstdint>

#include "host/budget.h"
#include "host/capi.h"
#include "host/check.h"
#include "host/dispatch.h"
#include "host/limits.h"
#include "host/status.h"

namespace flash_dist {

namespace {

constexpr int64_t ALIGNMENT = 256;
constexpr int64_t MAX_UNITS = INT32_MAX;  // of all sequences, which kernels count in 32 bits

template <class Number>
Number divide_up(Number a, Number b) {
  return (a + b - 1) / b;
}

void check_sizes(const DecodeParams& p) {
  const int64_t num_heads_q = int64_t{p.num_heads_kv} * p.group;
  const std::string problem =
      find_size_problem({p.batch, p.seqlen_q, p.cache.capacity, num_heads_q, 0, 0});
  if (!problem.empty()) fail(problem);
  const int64_t rows = int64_t{p.group} * p.seqlen_q;
  if (rows > MAX_SEQLEN)
    fail("heads_per_kv * seqlen_q must be at most ", MAX_SEQLEN, ", got ", rows);
}

// How the units of all sequences are shared out, and what partial results take. All that depends on
// the GPU or the budget decides who computes what, and no bit of it.
class Decode {
 public:
  Decode(const Call& call, const DecodeParams& params, int64_t budget)
      : call_(call), p_(params), kernel_(require_kernel(call.device, key_of(Role::DECODE), &p_)) {
    p_.rows = p_.group * p_.seqlen_q;
    p_.row_tiles = divide_up(p_.rows, TASK_ROWS);
    p_.tile_rows = std::min(p_.rows, TASK_ROWS);
    p_.columns = kernel_.variant->size.head_dim_v;
    if (longest_units() * p_.batch * tasks() > MAX_UNITS) {
      fail("units of ", UNIT_KEYS, " keys, times tiles of ", TASK_ROWS,
           " queries of a group, must ", "be at most ", MAX_UNITS, ", got ",
           longest_units() * p_.batch * tasks(),
           "\n\nhint: fewer queries in a call give the same bits");
    }
    const int64_t blocks =
        int64_t{device_info(call.device).sm_count} * kernel_.variant->entry->blocks_per_sm;
    const int64_t units = most_units();
    p_.shares = static_cast<int>(std::min(blocks, units));
    // A block of the fold for each multiprocessor, or more.
    const int sm_count = device_info(call.device).sm_count;
    const int64_t folded = std::min<int64_t>(p_.batch * tasks(), p_.shares);
    const int pieces = p_.tile_rows * (p_.columns / 64);
    p_.fold_parts =
        static_cast<int>(std::min<int64_t>(divide_up<int64_t>(2 * sm_count, folded), pieces));
    place(units, budget);
  }

  int64_t workspace_bytes() const { return stats_bytes_ + out_bytes_; }

  void run(void* workspace) {
    p_.partial_stats = static_cast<float2*>(workspace);
    p_.partial_out = reinterpret_cast<float*>(static_cast<uint8_t*>(workspace) + stats_bytes_);
    const auto stream = static_cast<cudaStream_t>(call_.stream);
    launch(call_.device, kernel_, &p_, stream);
    if (p_.max_units == 0) return;
    launch(call_.device, require_kernel(call_.device, key_of(Role::DECODE_FOLD), &p_), &p_, stream);
  }

 private:
  KernelKey key_of(Role role) const {
    return {role, static_cast<Dtype>(call_.dtype), {p_.head_dim, p_.head_dim_v}};
  }

  int64_t tasks() const { return int64_t{p_.row_tiles} * p_.num_heads_kv; }
  int64_t longest_units() const {
    return std::max(divide_up<int64_t>(p_.cache.capacity, UNIT_KEYS), int64_t{1});
  }
  // Of sequences that fill the cache. A table has room for more than there are pages: where few
  // pages are of many sequences there may be more units than this.
  int64_t most_units() const {
    const int64_t keys = int64_t{p_.cache.entries} * p_.cache.page;
    const int64_t in_memory = 2 * (divide_up<int64_t>(keys, UNIT_KEYS) + p_.batch);
    return std::min(longest_units() * p_.batch, in_memory) * tasks();
  }

  // As many records as full caches need, or as the budget holds.
  void place(int64_t units, int64_t budget) {
    const int64_t record = int64_t{p_.tile_rows} * (p_.columns * 4 + 8);
    const int64_t affordable = std::max<int64_t>(budget - ALIGNMENT, 0) / record;
    const int64_t fixed = decode_records(0, p_.shares);
    const bool may_split = p_.cache.capacity > UNIT_KEYS && p_.shares > 1;
    const int64_t most = affordable > fixed ? (affordable - fixed) * GROUP_UNITS : 0;
    p_.max_units = may_split ? static_cast<int>(std::min(units, most)) : 0;
    const int64_t records = p_.max_units == 0 ? 0 : decode_records(p_.max_units, p_.shares);
    stats_bytes_ = divide_up(records * p_.tile_rows * 8, ALIGNMENT) * ALIGNMENT;
    out_bytes_ = records * p_.tile_rows * p_.columns * 4;
  }

  const Call& call_;
  DecodeParams p_;
  const Loaded kernel_;
  int64_t stats_bytes_ = 0, out_bytes_ = 0;
};

void run_decode(const Call& call, const DecodeParams& params, int64_t budget, Allocate allocate,
                void* context) {
  check_sizes(params);
  const DeviceScope scope(call.device);
  Decode decode(call, params, read_budget(budget));
  const int64_t bytes = decode.workspace_bytes();
  void* workspace = bytes == 0 ? nullptr : allocate(context, bytes);
  if (bytes != 0 && workspace == nullptr) {
    fail("CUDA out of memory. flash_dist could not allocate ", bytes, " bytes of workspace on GPU ",
         call.device, "\n\nhint: FLASH_DIST_WORKSPACE_MB sets a smaller budget");
  }
  decode.run(workspace);
}

void run_append(const Call& call, const AppendParams& p) {
  const DeviceScope scope(call.device);
  const KernelKey key{Role::APPEND, static_cast<Dtype>(call.dtype), {p.head_dim, p.head_dim_v}};
  launch(call.device, require_kernel(call.device, key, &p), &p,
         static_cast<cudaStream_t>(call.stream));
}

}  // namespace

}  // namespace flash_dist

using namespace flash_dist;

int flash_dist_decode(const Call* call, const DecodeParams* params, int64_t budget,
                      Allocate allocate, void* context) {
  return guarded([&] {
    run_decode(*call, *params, budget, allocate, context);
    return 0;
  });
}

int flash_dist_append(const Call* call, const AppendParams* params) {
  return guarded([&] {
    run_append(*call, *params);
    return 0;
  });
}
