// Launches of attention to a cache.
#include <algorithm>
#include <cstdint>

#include "core/params.h"
#include "host/call.h"
#include "host/decode.h"
#include "host/decode_splits.h"
#include "host/limits.h"
#include "host/recording.h"
#include "host/scores.h"
#include "native/check.h"
#include "native/status.h"

namespace flash_dist {

namespace {

constexpr int64_t MAX_KEY_BLOCKS = INT32_MAX;  // over all sequences: kernels count in 32 bits
constexpr int FEW_ROWS = 16;                   // rows of a work tile that one mma covers
constexpr int MAX_HEAD_DIM = 512;              // limit if V is a separate tensor
constexpr int SPLIT_HEAD_DIM = 256;            // is_latent() is false up to this head_dim
constexpr int COMBINE_BLOCKS_PER_SM = 5;       // blocks of the combine kernel
// Latent keys: P is stored only for calls with at most FEW_LATENT_TILES work tiles and, in total,
// FEW_KEY_BLOCKS key blocks of these tiles. If P is stored, the keys are read twice.
constexpr int FEW_LATENT_TILES = 16;
constexpr int64_t FEW_KEY_BLOCKS = 256;
static_assert(FEW_LATENT_TILES <= MOST_FEW_TILES);
constexpr int64_t TILE_ROWS = 64, TILE_WEIGHTS = 64 * 64;  // rows and elements of P per tile
// With several row tiles, tiles_differ is set from this many work tiles per split on. With fewer,
// either some splits would get several of the longest tiles, or tiles would be cut and combined.
constexpr int TILES_PER_SPLIT = 3;
// Pairs of blocks compute tiles longer than half a group only if there is at least one tile per
// FEW_TILES multiprocessors.
constexpr int FEW_TILES = 6;

template <class Number>
Number divide_up(Number a, Number b) {
  return (a + b - 1) / b;
}

// Tells if a call uses the kernels for latent keys, whose first columns are the values. Latent keys
// with few columns use the kernels for separate K and V, which read the same tensor twice.
bool is_latent(const DecodeParams& p) {
  return p.cache.v.data == nullptr && p.head_dim > SPLIT_HEAD_DIM;
}

DecodeParams with_values(DecodeParams p) {
  if (p.cache.v.data == nullptr) p.cache.v = p.cache.k;
  return p;
}

void check_latent(const DecodeParams& p) {
  if (p.head_dim > MAX_HEAD_DIM && !is_latent(p)) {
    fail("values must be the first columns of the keys for head_dim above ", MAX_HEAD_DIM,
         ", got another tensor and head_dim ", p.head_dim);
  }
  if (is_latent(p) && (p.scores.softcap != 0.0f || p.scores.alibi != nullptr)) {
    fail("softcap must be 0 and alibi_slopes None for values in keys of head_dim above ",
         SPLIT_HEAD_DIM, ", got softcap ", p.scores.softcap,
         p.scores.alibi != nullptr ? " with" : " without", " alibi_slopes and head_dim ",
         p.head_dim);
  }
}

// Rejects arguments that the binding rejects, for callers without the binding. Kernels compute the
// row of a new key in 32 bits, which must not overflow before they compare the row with the
// capacity.
template <class Params>
void check_cache(const Params& p, int64_t num_heads_q) {
  const std::string problem =
      find_size_problem({p.batch, p.seqlen_q, p.cache.capacity, num_heads_q, 0, 0});
  if (!problem.empty()) fail(problem);
  if (p.cache.seqlen_new > MAX_SEQLEN) {
    fail("seqlen_new must be at most ", MAX_SEQLEN, ", got ", p.cache.seqlen_new);
  }
}

void check_sizes(const DecodeParams& p) {
  check_cache(p, int64_t{p.num_heads_kv} * p.group);
  if (p.batch < 1 || p.seqlen_q < 1) {
    fail("batch and seqlen_q must be at least 1 to read a cache, got ", p.batch, " and ",
         p.seqlen_q);
  }
  const int64_t rows = int64_t{p.group} * p.seqlen_q;
  if (rows > MAX_SEQLEN)
    fail("heads_per_kv * seqlen_q must be at most ", MAX_SEQLEN, ", got ", rows);
  check_latent(p);
}

// Plans and launches one call. The GPU and the budget decide which block computes what, but affect
// no bit of the result.
class Decode {
 public:
  // budget: maximum of workspace_bytes(), except for the partials that keep O of a work tile.
  Decode(const Call& call, const DecodeParams& params, int64_t budget)
      : call_(call),
        latent_(is_latent(params)),
        p_{with_values(params), 0, nullptr, nullptr},
        kernel_(choose_kernel()),
        softmax_blocks_(
            latent_ && kernel_.variant->entry->block_rows > FEW_ROWS ? LATENT_SOFTMAX_BLOCKS : 1) {
    const int rows = most_rows(p_);
    p_.block_rows = kernel_.variant->entry->block_rows * choose_blocks();
    p_.row_tiles = divide_up(rows, p_.block_rows);
    p_.partial_rows = std::min(rows, p_.block_rows);
    p_.columns = size_of(*kernel_.variant).head_dim_v;
    check_key_blocks();
    if (kernel_.variant->role == Role::DECODE_PAIR) {
      p_.splits = static_cast<int>(p_.batch * tiles());
      p_.tiles_differ = p_.max_key_blocks = 0;  // no partial is stored or combined
      return;
    }
    const int sm_count = device_info(call.device).sm_count;
    const int blocks_of_split = choose_blocks() * kernel_.variant->entry->cluster;
    const int splits =
        choose_splits(std::max(sm_count / blocks_of_split, 1),
                      kernel_.variant->entry->blocks_per_sm, static_cast<int>(p_.batch * tiles()));
    const int64_t key_blocks = most_key_blocks();
    p_.splits = static_cast<int>(std::min<int64_t>(splits, key_blocks));
    p_.tiles_differ = p_.row_tiles > 1 && p_.batch * tiles() >= TILES_PER_SPLIT * p_.splits;
    // The combine kernel gets as many blocks per work tile as fit on the GPU, but at most one for
    // each 32 columns of a row.
    const int64_t combined = std::min<int64_t>(p_.batch * tiles(), p_.splits);
    const int64_t parts =
        std::max<int64_t>(COMBINE_BLOCKS_PER_SM * int64_t{sm_count} / combined, 1);
    p_.combine_blocks =
        static_cast<int>(std::min<int64_t>(parts, p_.partial_rows * (p_.columns / 32)));
    place(key_blocks, budget);
  }

  int64_t workspace_bytes() const { return stats_bytes_ + out_bytes_ + weights_bytes(); }

  // Tells if tiles_differ is set. Cutting so many work tiles would not be faster.
  bool has_whole_tiles() const { return p_.tiles_differ != 0; }

  void run(void* workspace) {
    auto* const memory = static_cast<uint8_t*>(workspace);
    p_.partial_stats = reinterpret_cast<float2*>(memory);
    p_.partial_out = reinterpret_cast<float*>(memory + stats_bytes_);
    const auto stream = static_cast<cudaStream_t>(call_.stream);
    record_decode(p_, softmax_blocks_);
    if (p_.few_key_blocks > 0) {
      p_.weights = reinterpret_cast<uint16_t*>(memory + stats_bytes_ + out_bytes_);
      p_.tile_stats = reinterpret_cast<float2*>(p_.weights + 2 * p_.few_key_blocks * TILE_WEIGHTS);
      for (const Role half : {Role::MLA_WEIGHTS, Role::MLA_VALUES}) {
        launch(call_.device, require_kernel(call_.device, key_of(half), &p_), &p_, stream);
      }
    }
    if (p_.few_key_blocks == 0) launch(call_.device, kernel_, &p_, stream);
    if (p_.max_key_blocks == 0) return;
    const Role combine = latent_ ? Role::MLA_FOLD : Role::DECODE_FOLD;
    launch(call_.device, require_kernel(call_.device, key_of(combine), &p_), &p_, stream);
  }

 private:
  KernelKey key_of(Role role) const {
    return make_key(role, static_cast<Dtype>(call_.dtype), {p_.head_dim, p_.head_dim_v});
  }

  // Tells if two blocks should compute each work tile together: if tiles have few rows and two or
  // more key blocks that form one group, and there is at most one tile per multiprocessor. For few
  // long tiles, more than two blocks per tile are faster.
  bool suits_pairs() const {
    const int64_t key_blocks = longest_key_blocks();
    if (most_rows(p_) > FEW_ROWS || key_blocks == 1 || key_blocks > GROUP_BLOCKS) return false;
    const int64_t tiles = int64_t{p_.batch} * p_.num_heads_kv;
    const int sm_count = device_info(call_.device).sm_count;
    return tiles <= sm_count && (tiles * FEW_TILES >= sm_count || key_blocks <= GROUP_BLOCKS / 2);
  }

  // For work tiles of 64 rows, chooses the kernel with two blocks per tile if it exists, and if the
  // GPU has a multiprocessor for each block; else the kernel with one block.
  Loaded choose_latent_kernel() const {
    const Loaded latent = require_kernel(call_.device, key_of(Role::MLA), &p_);
    if (latent.variant->entry->block_rows == FEW_ROWS) return latent;
    if (2 * latent_tiles() > device_info(call_.device).sm_count) return latent;
    const Loaded pair = find_kernel(call_.device, key_of(Role::MLA_PAIR), &p_);
    return pair.variant != nullptr ? pair : latent;
  }

  // Chooses a kernel that is built and can be loaded: the one for latent keys, for more rows than
  // one mma covers, for pairs of blocks, or otherwise the one for 16 rows.
  Loaded choose_kernel() const {
    if (latent_) return choose_latent_kernel();
    if (most_rows(p_) > FEW_ROWS) {
      const Loaded wide = find_kernel(call_.device, key_of(Role::DECODE_WIDE), &p_);
      if (wide.variant != nullptr) return wide;
    }
    if (suits_pairs()) {
      const Loaded pair = find_kernel(call_.device, key_of(Role::DECODE_PAIR), &p_);
      if (pair.variant != nullptr) return pair;
    }
    return require_kernel(call_.device, key_of(Role::DECODE), &p_);
  }

  // Returns the number of work tiles of 64 rows.
  int64_t latent_tiles() const {
    return divide_up<int64_t>(most_rows(p_), TILE_ROWS) * p_.num_heads_kv * p_.batch;
  }

  // Returns the number of blocks that share the rows of a work tile: two for latent keys in blocks
  // of 64 rows if the group has more than 64 heads, unless there are few work tiles or the kernel
  // is MLA_PAIR; else one.
  int choose_blocks() const {
    if (softmax_blocks_ == 1 || p_.group <= TILE_ROWS) return 1;
    const bool is_pair = kernel_.variant->role == Role::MLA_PAIR;
    return is_pair || latent_tiles() <= FEW_LATENT_TILES ? 1 : 2;
  }

  int64_t tiles() const { return int64_t{p_.row_tiles} * p_.num_heads_kv; }

  int64_t longest_key_blocks() const {
    return std::max(divide_up<int64_t>(p_.cache.capacity, KEY_BLOCK), int64_t{1});
  }

  // Returns an upper bound on the number of key blocks of all work tiles, if sequences share no
  // pages. If they share pages, there may be more key blocks.
  int64_t most_key_blocks() const {
    const int64_t keys = int64_t{p_.cache.entries} * p_.cache.page;
    const int64_t in_memory = 2 * (divide_up<int64_t>(keys, KEY_BLOCK) + p_.batch);
    return std::min(longest_key_blocks() * p_.batch, in_memory) * tiles();
  }

  void check_key_blocks() const {
    const int64_t key_blocks = longest_key_blocks() * p_.batch;
    if (key_blocks <= MAX_KEY_BLOCKS / tiles()) return;  // their product may exceed 2^63
    fail("blocks of ", KEY_BLOCK, " keys * tiles of ", p_.block_rows,
         " queries of a group must be at most ", MAX_KEY_BLOCKS, ", got ", key_blocks, " * ",
         tiles(), "\n\nhint: pass fewer queries in a call, which gives the same bits");
  }

  // Chooses the number of partials, and whether P is stored. There are as many partials as full
  // caches need, if the budget allows. The partials that keep O of a work tile are needed with any
  // budget.
  void place(int64_t key_blocks, int64_t budget) {
    const int64_t partial = int64_t{p_.partial_rows} * (p_.columns * 4 + 8);
    const int64_t affordable = std::max<int64_t>(budget - ALIGNMENT, 0) / partial;
    const int64_t fixed = decode_partials(0, p_.splits, softmax_blocks_);
    const bool may_split = longest_key_blocks() > softmax_blocks_ && p_.splits > 1;
    const int64_t most =
        affordable > fixed ? (affordable - fixed) * group_blocks(softmax_blocks_) : 0;
    p_.max_key_blocks = may_split ? static_cast<int>(std::min(key_blocks, most)) : 0;
    const bool rests = longest_key_blocks() > softmax_blocks_;
    const int64_t least = rests ? int64_t{p_.splits} * resting_partials(softmax_blocks_) : 0;
    const int64_t partials = p_.max_key_blocks == 0
                                 ? least
                                 : decode_partials(p_.max_key_blocks, p_.splits, softmax_blocks_);
    stats_bytes_ = aligned(partials * p_.partial_rows * 8);
    out_bytes_ = aligned(partials * p_.partial_rows * p_.columns * 4);
    if (softmax_blocks_ == 1 || p_.block_rows > TILE_ROWS ||
        p_.batch * tiles() > FEW_LATENT_TILES || p_.left < UNBOUNDED) {
      return;
    }
    // NOTE: key_blocks would be too small if sequences share pages.
    const int64_t most_of_table = longest_key_blocks() * p_.batch * tiles();
    if (most_of_table > FEW_KEY_BLOCKS) return;
    p_.few_key_blocks = static_cast<int>(most_of_table);
    if (workspace_bytes() > budget) p_.few_key_blocks = 0;
  }

  // Returns the bytes of the stored P, two tiles per key block, with the top and sum of each row.
  int64_t weights_bytes() const {
    return p_.few_key_blocks * 2 * (TILE_WEIGHTS * 2 + TILE_ROWS * int64_t{sizeof(float2)});
  }

  const Call& call_;
  const bool latent_;
  LatentParams p_;
  const Loaded kernel_;
  const int softmax_blocks_;  // key blocks per softmax
  int64_t stats_bytes_ = 0, out_bytes_ = 0;
};

// Returns the parameters of a forward that computes attention to a cache. The kernel also gets the
// CacheParams.
FwdParams as_forward(const DecodeParams& d) {
  FwdParams p{};
  p.q = d.q;
  p.k = d.cache.k;
  p.v = d.cache.v;
  p.out = d.out;
  p.lse = d.lse;
  p.batch = d.batch;
  p.seqlen_q = d.seqlen_q;
  p.seqlen_k = d.cache.capacity;
  p.num_heads_kv = d.num_heads_kv;
  p.group = d.group;
  p.total_q = d.total_q;
  p.head_dim = d.head_dim;
  p.head_dim_v = d.head_dim_v;
  p.softmax_scale = d.softmax_scale;
  p.packing.cu_seqlens_q = d.packing.cu_seqlens_q;
  p.mask.kind = MaskKind::BAND;
  p.mask.left = d.left;
  p.mask.right = d.right;
  p.mask.bottom_right = d.bottom_right;
  p.scores = d.scores;
  p.sinks = d.sinks;
  return p;
}

}  // namespace

DecodeParams as_cache(const FwdParams& p, bool few_alone) {
  const bool packed = p.packing.cu_seqlens_q != nullptr;
  DecodeParams d{};
  d.q = p.q;
  d.out = p.out;
  d.lse = p.lse;
  d.cache.k = p.k;
  d.cache.v = p.v;
  d.cache.entries = packed ? 1 : p.batch;
  d.cache.page = packed ? p.total_k : p.seqlen_k;
  d.cache.capacity = p.seqlen_k;
  d.cache.cu_seqlens_k = p.packing.cu_seqlens_k;
  d.packing = p.packing;
  d.batch = p.batch;
  d.seqlen_q = p.seqlen_q;
  d.num_heads_kv = p.num_heads_kv;
  d.group = p.group;
  d.total_q = p.total_q;
  d.head_dim = p.head_dim;
  d.head_dim_v = p.head_dim_v;
  d.left = p.mask.left;
  d.right = p.mask.right;
  d.bottom_right = p.mask.bottom_right;
  d.few_alone = few_alone;
  d.softmax_scale = p.softmax_scale;
  d.scores = p.scores;
  d.sinks = p.sinks;
  return d;
}

bool may_have_few_queries(const Call& call, const FwdParams& p) {
  const auto dtype = static_cast<Dtype>(call.dtype);
  if (p.batch == 0 || p.seqlen_q == 0) return false;  // nothing to compute
  if (p.scores.has_score_mod || p.sinks != nullptr) return false;
  if (is_fp32(dtype) || p.mask.kind != MaskKind::BAND || p.seqlen_k < MANY_KEYS) return false;
  const bool packed = p.packing.cu_seqlens_q != nullptr;
  if (packed ? p.packing.cu_seqlens_q == p.packing.cu_seqlens_k
             : !is_few_queries(p.seqlen_q, p.seqlen_k)) {
    return false;  // packed with the same cu_seqlens: each sequence has as many queries as keys
  }
  const int64_t tiles = divide_up(int64_t{p.group} * MORE_QUERIES, int64_t{FEW_ROWS});
  if (divide_up(p.seqlen_k, KEY_BLOCK) * tiles * p.batch * p.num_heads_kv > MAX_KEY_BLOCKS)
    return false;
  const KernelKey key = make_key(Role::DECODE, dtype, {p.head_dim, p.head_dim_v});
  return find_kernel(call.device, key, nullptr).variant != nullptr;
}

void* run_few_queries(const Call& call, const FwdParams& p, int64_t front, Allocate allocate,
                      void* context) {
  const DecodeParams few = as_cache(p, p.packing.cu_seqlens_q != nullptr);
  Decode decode(call, few, allocate == nullptr ? 0 : read_budget(BUDGET_NOW));
  const int64_t bytes = front + decode.workspace_bytes();
  void* memory = bytes == 0 ? nullptr : allocate(context, bytes);
  if (memory != nullptr || decode.workspace_bytes() == 0) {
    decode.run(memory == nullptr ? nullptr : static_cast<uint8_t*>(memory) + front);
  } else {
    Decode(call, few, 0).run(nullptr);
  }
  return memory;
}

void run_as_cache(const Call& call, const DecodeParams& p, Allocate allocate, void* context) {
  check_sizes(p);
  const bool is_whole = Decode(call, p, 0).has_whole_tiles();
  Decode decode(call, p, is_whole ? 0 : read_budget(BUDGET_NOW));
  decode.run(require_workspace(call, decode.workspace_bytes(), allocate, context));
}

}  // namespace flash_dist

using namespace flash_dist;

int flash_dist_decode(const Call* call, const DecodeParams* params, int64_t budget,
                      Allocate allocate, void* context) {
  return guarded([&] {
    check_sizes(*params);
    const DeviceScope scope(call->device);
    const DecodeParams p = with_scores(*params);
    const int64_t bytes = read_budget(budget);
    if (p.seqlen_q > FEW_QUERIES &&
        run_fwd_kvcache(*call, as_forward(p), p.cache, bytes, allocate, context)) {
      return 0;
    }
    Decode decode(*call, p, bytes);
    decode.run(require_workspace(*call, decode.workspace_bytes(), allocate, context));
    return 0;
  });
}

int flash_dist_append(const Call* call, const AppendParams* params) {
  return guarded([&] {
    check_cache(*params, std::max(params->num_heads_q, params->num_heads_kv));  // q may be absent
    const DeviceScope scope(call->device);
    const auto dtype = static_cast<Dtype>(call->dtype);
    const KernelKey key = make_key(Role::APPEND, dtype, {params->head_dim, params->head_dim_v});
    launch(call->device, require_kernel(call->device, key, params), params,
           static_cast<cudaStream_t>(call->stream));
    return 0;
  });
}
