// Splits long sequences into query x key chunks, and estimates their cost.
//
// A grid of chunks covers some units, which are (batch, kv head) pairs. A key chunk has as many
// keys as fill one to MOST_WAVES waves of dK/dV blocks. A query chunk has as many queries as the
// rest of the budget allows. Fully masked chunks are left out, except those that write the zero
// gradients of masked keys or queries. There are two orders. With keys_first, all query chunks of a
// key chunk run in a row: memory holds dK and dV of one key chunk, but dQ of all queries. Otherwise
// all key chunks of a query chunk run in a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "host/plan_grid.h"

namespace flash_dist {

// Maximum number of waves per key chunk. More waves would not balance the load better.
constexpr int64_t MOST_WAVES = 4;
// Chunks with fewer query tiles would spend more time on loading and storing dK and dV than they
// save by storing dS.
constexpr int64_t LEAST_QUERY_TILES = 32;
// The fixed cost of a block, in tiles. The block's operands cost BLOCK_OVERHEAD tiles. Loading and
// storing its sums costs one tile per DKDV_COLUMNS columns, or one tile per DQ_COLUMNS columns for
// the dQ kernel, which is bound by memory.
constexpr int64_t BLOCK_OVERHEAD = 6;
constexpr int64_t DKDV_COLUMNS = 64;
constexpr int64_t DQ_COLUMNS = 16;

class ChunkPlanner : PlanGrid {
 public:
  explicit ChunkPlanner(const PlanGrid& grid) : PlanGrid(grid) {}

  // Sets plan to the cheapest cut within `left` bytes, and returns false if there is none. Of cuts
  // with the same cost, takes the one with the fewest units. Returns false for masks with
  // arrays, which have slots only for whole key tiles; for packed documents, which may start at
  // any row; and for ALiBi, bias and dropout, which depend on a query's position.
  bool cut(BwdPlan& plan, int64_t left) const {
    if (shape_.mask.kind != MaskKind::BAND || shape_.total_q >= 0) return false;
    if (shape_.aligned) return false;
    Cut best{};
    int64_t least = 0;
    for (int64_t units = 1; units <= std::min(units_, resident_); ++units) {
      if (units_ % units != 0) continue;
      for (int64_t waves = 1; waves <= MOST_WAVES; ++waves) {
        for (const bool keys_first : {true, false}) {
          const Cut cut = make_cut(plan, left, units, waves, keys_first);
          if (cut.tiles == 0) continue;
          list_chunks(plan, cut, cut.units, cut.members);
          const int64_t cost = cost_of(plan);
          if (best.tiles > 0 && cost >= least) continue;
          least = cost;
          best = cut;
        }
      }
    }
    if (best.tiles == 0) return false;
    list_chunks(plan, best, units_, members(plan.group_split));
    plan.ds_tiles_per_head = best.steps * (step_ / DS_TILE) * best.tiles;
    plan.dq_accum = best.accum;
    if (plan.group_split == 1) {
      plan.dk_partial = best.sums_k;
      plan.dv_partial = best.sums_v;
    }
    return true;
  }

  // Estimated time of all chunks of a call with a band, in (query, key) products per
  // multiprocessor.
  int64_t cost_of(const BwdPlan& plan) const {
    int64_t cost = 0;
    for (const BwdChunk& chunk : plan.chunks) {
      if (chunk.unit_begin > 0 || chunk.member_begin > 0) continue;  // all heads cost the same
      cost +=
          cost_of(plan, chunk) * (units_ / chunk.units) * members(plan.group_split) / chunk.members;
    }
    return cost;
  }

 private:
  // A way to cut the queries and keys of some units into chunks.
  struct Cut {
    int64_t units, steps;    // per chunk: units, and steps of keys
    int64_t members, tiles;  // per chunk: query heads of each split, query tiles of each head
    bool keys_first;         // all query chunks of a key chunk run in a row; false: vice versa
    int64_t accum, sums_k, sums_v;  // bytes kept between chunks
  };

  // Returns the cut whose key chunks fill at most `waves` waves, with as many queries as memory
  // allows. Its `tiles` is 0 if memory allows fewer than LEAST_QUERY_TILES query tiles, or if the
  // key chunks would not fill one wave.
  Cut make_cut(const BwdPlan& plan, int64_t left, int64_t units, int64_t waves,
               bool keys_first) const {
    const int64_t split = plan.group_split;
    const int64_t steps =
        std::min<int64_t>(waves * resident_ / (blocks(units, 1) * split), key_steps_);
    Cut cut{units, steps, 1, 0, keys_first, 0, 0, 0};
    if (steps == 0 || !fills(plan, units, steps)) return cut;
    if (split == 1) {  // with more splits, their partial sums already hold dK and dV
      const int64_t rows = units * (keys_first ? steps * step_ : int64_t{shape_.seqlen_k});
      cut.sums_k = sizeof(float) * rows * shape_.head_dim;
      cut.sums_v = sizeof(float) * rows * shape_.head_dim_v;
      left -= cut.sums_k + cut.sums_v;
    }
    // dQ of all queries, or of one query chunk, is kept until the next key chunk.
    const int64_t all = padded(shape_.seqlen_q) / DS_TILE;
    const int64_t ds = DS_TILE_BYTES * steps * (step_ / DS_TILE) * units * split;
    const int64_t dq = sizeof(float) * DS_TILE * shape_.head_dim * units * split;
    if (keys_first) left -= dq_bytes(units * shape_.group);
    const int64_t most = left <= 0 ? 0 : left / (keys_first ? ds : ds + dq);
    if (most < LEAST_QUERY_TILES) return cut;
    cut.members = std::min<int64_t>(std::max<int64_t>(most / all, 1), members(split));
    const int64_t count = most >= all ? 1 : ceil_div(all, most / 2 * 2);
    cut.tiles = ceil_div(ceil_div(all, count), 2) * 2;  // a multiple of ROW_PADDING queries
    cut.accum = keys_first ? dq_bytes(units * shape_.group) : dq * cut.tiles * cut.members;
    return cut;
  }

  // Returns how many query tiles of [first, last) may attend to keys of a key step.
  int64_t tiles_seen(int64_t step, int64_t first, int64_t last) const {
    const int64_t tiles = ceil_div(shape_.seqlen_k, DS_TILE);
    const int64_t n = step * (step_ / DS_TILE);
    const int64_t end = std::min(n + step_ / DS_TILE, tiles);
    const int64_t from = std::max<int64_t>(layout_.query_begin(static_cast<int>(n)), first);
    const int64_t to = std::min<int64_t>(layout_.query_end(static_cast<int>(end - 1)), last);
    return std::max<int64_t>(to - from, 0);
  }

  // True if a query of the tiles [first, last) may attend to a key of the key steps [begin, end).
  bool is_seen(int64_t begin, int64_t end, int64_t first, int64_t last) const {
    for (int64_t step = begin; step < end; ++step) {
      if (tiles_seen(step, first, last) > 0) return true;
    }
    return false;
  }

  int64_t cost_of(const BwdPlan& plan, const BwdChunk& chunk) const {
    const int64_t first = chunk.query_begin / DS_TILE;
    const int64_t last = ceil_div(chunk.query_end, DS_TILE);
    const int64_t groups = chunk.units * plan.group_split;
    std::vector<int64_t> dkdv, dq;  // lengths of blocks, in tiles
    const int64_t sums = (shape_.head_dim + shape_.head_dim_v) / DKDV_COLUMNS;
    for (int64_t step = chunk.key_begin / step_; step * step_ < chunk.key_end; ++step) {
      const int64_t seen = tiles_seen(step, first, last) * chunk.members;
      if (seen > 0) dkdv.push_back(seen + BLOCK_OVERHEAD + sums);
    }
    const int64_t rows = kernels_.dq_rows / DS_TILE;
    for (int64_t m = first; m < last; m += rows) {
      const int64_t seen = keys_seen(m, std::min(m + rows, last) - 1, chunk);
      if (seen > 0) dq.push_back(seen + BLOCK_OVERHEAD + shape_.head_dim / DQ_COLUMNS);
    }
    const int64_t dq_resident = int64_t{kernels_.sm_count} * kernels_.dq_blocks_per_sm;
    return DKDV_PRODUCTS * kernels_.key_tile * kernels_.blocks_per_sm / kernels_.cluster * DS_TILE *
               longest_sum(dkdv, blocks(groups, 1), resident_) +
           int64_t{kernels_.dq_rows} * kernels_.dq_blocks_per_sm * DS_TILE *
               longest_sum(dq, groups * chunk.members, dq_resident);
  }

  // Returns how many key tiles of the chunk may be visible to the query tiles [first, last].
  int64_t keys_seen(int64_t first, int64_t last, const BwdChunk& chunk) const {
    const int64_t from =
        std::max<int64_t>(layout_.key_begin(static_cast<int>(first)), chunk.key_begin / DS_TILE);
    const int64_t to = std::min<int64_t>(layout_.key_end(static_cast<int>(last)),
                                         ceil_div(chunk.key_end, DS_TILE));
    return std::max<int64_t>(to - from, 0);
  }

  // Estimated time of `alike` blocks of each length. `resident` blocks run at a time, the longest
  // first. Returns the time of the longest series of blocks that run one after the other, but at
  // least the average load.
  static int64_t longest_sum(std::vector<int64_t>& lengths, int64_t alike, int64_t resident) {
    std::sort(lengths.begin(), lengths.end(), std::greater<int64_t>());
    int64_t total = 0, longest = 0, blocks = 0;
    for (const int64_t length : lengths) {
      total += length * alike;
      blocks += alike;
      longest = std::max(longest, ceil_div(blocks, resident) * length);
    }
    return std::max(longest, ceil_div(total, resident));
  }

  // Lists the chunks of `units` units and of `members_of_split` query heads per group split.
  void list_chunks(BwdPlan& plan, const Cut& cut, int64_t units, int64_t members_of_split) const {
    const int64_t key_chunks = ceil_div(key_steps_, cut.steps);
    const int64_t of_a_head = ceil_div(ceil_div(shape_.seqlen_q, DS_TILE), cut.tiles);
    const int64_t query_chunks = of_a_head * ceil_div(members_of_split, cut.members);
    const std::vector<bool> wanted = find_visible(cut, key_chunks, of_a_head);
    plan.chunks.clear();
    for (int64_t unit = 0; unit < units; unit += cut.units) {
      // Index of the latest listed chunk of each key chunk and of each query chunk; -1: none.
      std::vector<int64_t> of_keys(key_chunks, -1), of_queries(query_chunks, -1);
      for (int64_t n = 0; n < key_chunks * query_chunks; ++n) {
        const int64_t i = cut.keys_first ? n / query_chunks : n % key_chunks;
        const int64_t j = cut.keys_first ? n % query_chunks : n / key_chunks;
        if (!wanted[i * of_a_head + j % of_a_head]) continue;
        BwdChunk chunk = make_chunk(plan, cut, unit, i, j / of_a_head, j % of_a_head);
        chunk.dq_first = of_queries[j] < 0;
        chunk.sums_first = of_keys[i] < 0;
        of_queries[j] = of_keys[i] = static_cast<int64_t>(plan.chunks.size());
        plan.chunks.push_back(chunk);
      }
      for (const int64_t last : of_queries) plan.chunks[last].dq_last = true;
      for (const int64_t last : of_keys) plan.chunks[last].sums_last = true;
    }
  }

  // Returns flags [key_chunks, query_chunks], true for the query x key chunks to run: those with a
  // visible score. If all those of a key chunk, or of a query chunk, have no visible score, the
  // first of them runs too, to write zero gradients.
  std::vector<bool> find_visible(const Cut& cut, int64_t key_chunks, int64_t query_chunks) const {
    std::vector<bool> wanted(key_chunks * query_chunks);
    std::vector<bool> of_keys(key_chunks), of_queries(query_chunks);
    for (int64_t i = 0; i < key_chunks; ++i) {
      for (int64_t j = 0; j < query_chunks; ++j) {
        const int64_t end = std::min((i + 1) * cut.steps, int64_t{key_steps_});
        if (!is_seen(i * cut.steps, end, j * cut.tiles, (j + 1) * cut.tiles)) continue;
        wanted[i * query_chunks + j] = of_keys[i] = of_queries[j] = true;
      }
    }
    for (int64_t i = 0; i < key_chunks; ++i) {
      if (!of_keys[i]) wanted[i * query_chunks] = true;
    }
    for (int64_t j = 0; j < query_chunks; ++j) {
      if (!of_queries[j]) wanted[j] = true;
    }
    return wanted;
  }

  // Makes the chunk of key chunk i, query chunk j and part `member_chunk` of the query heads, for
  // cut.units units from `unit` on.
  BwdChunk make_chunk(const BwdPlan& plan, const Cut& cut, int64_t unit, int64_t i,
                      int64_t member_chunk, int64_t j) const {
    BwdChunk chunk = whole_chunk(plan, unit, cut.units);
    chunk.key_begin = key_at(i * cut.steps);
    chunk.key_end = key_at((i + 1) * cut.steps);
    chunk.member_begin = static_cast<int>(member_chunk * cut.members);
    chunk.members = static_cast<int>(
        std::min<int64_t>(cut.members, members(plan.group_split) - chunk.member_begin));
    chunk.query_begin = query_at(j * cut.tiles);
    chunk.query_end = query_at((j + 1) * cut.tiles);
    chunk.dq_first = chunk.dq_last = chunk.sums_first = chunk.sums_last = false;
    if (cut.keys_first) {
      const int64_t rows =
          chunk.member_begin * padded(shape_.seqlen_q) + int64_t{chunk.members} * chunk.query_begin;
      chunk.dq_accum = cut.units * plan.group_split * rows * shape_.head_dim;
    }
    if (plan.group_split == 1) {
      chunk.sum_rows = {0, 0, shape_.seqlen_k};
      if (cut.keys_first) chunk.sum_rows = {-chunk.key_begin, 0, cut.steps * step_};
    }
    return chunk;
  }
};

}  // namespace flash_dist
