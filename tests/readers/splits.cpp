// Replays the splits of attention to a cache (core/decode_work.cuh) for sequences of random
// lengths: split by split, as the kernels do, and work tile by work tile, as the combine kernels
// do. Prints each call with an error, then the number of work tiles. These are errors:
// - A key block is not computed exactly once.
// - A partial is outside of the workspace, or written twice.
// - A partial is combined but was not stored.
// - A work tile does not have exactly one result.
// - The key blocks of a work tile are not exactly those with visible keys.
//
//   nvcc -std=c++17 -Xcompiler=-fno-access-control -I csrc -I GENERATED splits.cpp -o splits
#include <cstdio>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "one_thread.h"

#include "core/decode_combine.h"

using namespace flash_dist;

namespace {

std::mt19937 random_bits(1);

int below(int end) { return static_cast<int>(random_bits() % static_cast<unsigned>(end)); }
int one_of(std::initializer_list<int> numbers) {
  return numbers.begin()[below(static_cast<int>(numbers.size()))];
}

// A call, and the arrays that its parameters point to.
struct Cache {
  DecodeParams p{};
  std::vector<int> seqlens, leftpad, cu_seqlens_q{0}, cu_seqlens_k{0};

  Cache() {
    p.batch = 1 + below(9);
    p.num_heads_kv = one_of({1, 2, 3, 8});
    p.group = one_of({1, 2, 3, 8, 17});
    p.seqlen_q = one_of({1, 1, 2, 5, 16, 17, 64, 100, 300});
    p.block_rows = one_of({16, 64});
    p.cache.capacity = one_of({1, 127, 128, 129, 1000, 1024, 1025, 5000, 20000, 70000});
    p.left = one_of({UNBOUNDED, UNBOUNDED, 0, 1, 128, 3000});
    p.right = one_of({UNBOUNDED, UNBOUNDED, 0, 0, 1, 128});
    p.bottom_right = 1;
    const bool are_equal = below(4) == 0;
    for (int b = 0; b < p.batch; ++b) {
      const int lengths[] = {below(p.cache.capacity + 10), p.cache.capacity, one_of({-1, 0, 1})};
      seqlens.push_back(are_equal && b > 0 ? seqlens.front() : lengths[below(3)]);
      leftpad.push_back(below(300));
      cu_seqlens_q.push_back(cu_seqlens_q.back() + below(p.seqlen_q + 2));
      cu_seqlens_k.push_back(cu_seqlens_k.back() + below(p.cache.capacity + 1));
    }
    choose_kind();
    choose_splits();
  }
  Cache(const Cache&) = delete;

 private:
  // Chooses a cache, packed queries to a cache, or packed sequences of few queries.
  void choose_kind() {
    CacheParams& cache = p.cache;
    cache.entries = p.batch;
    cache.page = cache.capacity;
    const int kind = below(3);
    if (kind < 2) {
      cache.cache_seqlens = seqlens.data();
      cache.seqlen_new = below(3);
      if (below(3) == 0) cache.cache_leftpad = leftpad.data();
    }
    if (kind > 0) {
      p.packing.cu_seqlens_q = cu_seqlens_q.data();
      p.total_q = cu_seqlens_q.back();
    }
    if (kind == 2) {
      p.few_alone = true;
      p.bottom_right = below(2);
      cache.cu_seqlens_k = cu_seqlens_k.data();
      cache.entries = 1;
      cache.page = cu_seqlens_k.back();
    }
  }

  // Chooses splits as host/decode.cpp does, for GPUs and budgets of all sizes.
  void choose_splits() {
    const int rows = p.group * (p.few_alone ? min(p.seqlen_q, MORE_QUERIES) : p.seqlen_q);
    p.row_tiles = (rows + p.block_rows - 1) / p.block_rows;
    p.partial_rows = min(rows, p.block_rows);
    p.by_group = make_divisor(p.group);
    p.by_tiles = make_divisor(p.row_tiles);
    const int longest = max((p.cache.capacity + KEY_BLOCK - 1) / KEY_BLOCK, 1);
    const int key_blocks = longest * p.batch * p.row_tiles * p.num_heads_kv;
    p.splits = min(one_of({1, 2, 3, 7, 132, 264, 1000}), key_blocks);
    const bool may_split = p.cache.capacity > KEY_BLOCK && p.splits > 1;
    p.tiles_differ = below(4);
    p.max_key_blocks = !may_split ? 0 : below(4) == 0 ? below(key_blocks + 1) : key_blocks;
  }
};

// Identifies a work tile.
struct WorkTile {
  int batch, place, head;

  explicit WorkTile(const DecodeCursor& at) : batch(at.batch), place(at.place), head(at.head) {}
  bool operator<(const WorkTile& other) const {
    return std::tie(batch, place, head) < std::tie(other.batch, other.place, other.head);
  }
  bool operator==(const WorkTile& other) const { return !(*this < other) && !(other < *this); }
};

// The contents of a partial: a range of key blocks of a work tile.
struct StoredPartial {
  WorkTile tile;
  int begin, end;
};

template <int SOFTMAX_BLOCKS>
class Replay {
  using Splits = DecodeSplits<1, SOFTMAX_BLOCKS>;  // of one thread, which counts all sequences
  static constexpr int GROUP = Splits::GROUP;

 public:
  explicit Replay(const DecodeParams& params) : p(params), splits(count(params)) {
    const bool rests = p.cache.capacity > KEY_BLOCK * SOFTMAX_BLOCKS;
    const int least =
        rests ? p.splits * resting_partials(SOFTMAX_BLOCKS) : 0;  // independent of the budget
    partials_ =
        p.max_key_blocks == 0 ? least : decode_partials(p.max_key_blocks, p.splits, SOFTMAX_BLOCKS);
    key_blocks_.resize(splits.total);
  }

  bool is_right() {
    for (int split = 0; split < p.splits; ++split) compute(split);
    if (p.max_key_blocks > 0) combine();
    for (const int times : key_blocks_) right_ &= times == 1;
    for (int b = 0; b < p.batch; ++b) {
      const int row_tiles = DecodeExtent(p, {b, 0}).tiles;
      for (int place = 0; place < row_tiles; ++place) right_ &= has_visible_key_blocks({b, place});
      tiles += row_tiles * p.num_heads_kv;
    }
    for (const auto& [tile, times] : results_) right_ &= times == 1;
    return right_ && static_cast<int>(results_.size()) == tiles;
  }

  // True if tiles stay whole although there is room for partials.
  bool keeps_tiles() const {
    return splits.grain == Grain::TILE && splits.total <= p.max_key_blocks;
  }
  bool cuts_groups() const { return splits.grain == Grain::KEY_BLOCK; }

  int tiles = 0;

 private:
  // True if the tile has exactly the key blocks from the first to the last visible one, or a single
  // empty one.
  bool has_visible_key_blocks(RowTile own) const {
    const DecodeExtent extent(p, own);
    const CacheKeys keys(p.cache, own.batch, p.batch);
    const int shift = p.bottom_right ? keys.seqlen - extent.seqlen_q : 0;
    int first = INT32_MAX, end = 0;
    for (int i = 0; i < p.block_rows; ++i) {
      const int query = (extent.tile_at(p, own.place) * p.block_rows + i) / p.group;
      if (query >= extent.seqlen_q) break;
      const int64_t begin = int64_t{shift} + query - p.left,
                    last = int64_t{shift} + query + p.right;
      const auto from = p.left >= UNBOUNDED ? 0 : std::max<int64_t>(begin, 0);
      const auto to = p.right >= UNBOUNDED ? keys.seqlen : std::min<int64_t>(last + 1, keys.seqlen);
      if (from >= to) continue;
      first = std::min<int>(first, from / KEY_BLOCK);
      end = std::max<int>(end, (to - 1) / KEY_BLOCK + 1);
    }
    if (!p.tiles_differ) return extent.first <= first && end <= extent.end;
    return end == 0 ? extent.key_blocks() == 1 : extent.first == first && extent.end == end;
  }

  // Computes in one thread what the constructor of Splits computes with all threads of a block.
  static Splits count(const DecodeParams& p) {
    alignas(Splits) char bytes[sizeof(Splits)] = {};
    Splits& s = reinterpret_cast<Splits&>(bytes);
    for (RowTile own{0, 0}; own.batch < p.batch; own.advance(p))
      s.mine_ += Splits::key_blocks_of(p, own);
    s.total = s.mine_;
    s.each_ = s.total / p.splits;
    s.more_ = s.total % p.splits;
    const bool whole_tiles = SOFTMAX_BLOCKS > 1 && s.prefers_tiles(Splits::lengths_of(p));
    s.grain = s.choose_grain(p, s.total > p.max_key_blocks || whole_tiles);
    return s;
  }

  // Replays decode_block(), mla_block() and mla_sm90_block().
  void compute(int split) {
    int begin, end;
    DecodeCursor at;
    if (!splits.find_split(p, smem_, split, at, begin, end)) return;
    int first = at.key_block, part = at.key_block;  // first key blocks of group and partial
    for (int left = end - begin; left > 0; --left, at.advance(p)) {
      ++key_blocks_[at.position];
      if (at.position == at.group_begin<GROUP>()) first = at.key_block;
      if (SOFTMAX_BLOCKS == 1 || at.position == at.group_begin<GROUP>()) part = at.key_block;
      if (SOFTMAX_BLOCKS > 1 && at.position + 1 < at.group_end<GROUP>()) continue;
      const bool owns_tile = begin <= at.tile_begin() && at.tile_end() <= end;
      if (at.group_begin<GROUP>() < begin || end < at.group_end<GROUP>()) {
        right_ &= !owns_tile;
        write(splits.key_block_partial(p, at) + at.key_block % GROUP / SOFTMAX_BLOCKS, at, part);
      } else if (at.position + 1 < at.group_end<GROUP>()) {
        right_ &= SOFTMAX_BLOCKS == 1;  // otherwise a group is one partial
      } else if (!owns_tile) {
        write(splits.group_partial(p, at, split), at, first);
      } else if (at.position + 1 < at.tile_end()) {
        rest(split);
      } else {
        ++results_[WorkTile(at)];
      }
    }
  }

  // Checks the partials that keep a work tile's O after a group.
  void rest(int split) { right_ &= resting_partials(SOFTMAX_BLOCKS) * (split + 1) <= partials_; }

  void write(int64_t partial, const DecodeCursor& at, int first) {
    right_ &= resting_partials(SOFTMAX_BLOCKS) * p.splits <= partial && partial < partials_;
    right_ &= written_.insert({partial, {WorkTile(at), first, at.key_block + 1}}).second;
  }

  // Replays decode_combine_block().
  void combine() {
    const int most = p.batch * p.row_tiles * p.num_heads_kv;
    const bool by_tile = most <= p.splits;
    for (int block = 0; block < min(most, p.splits); ++block) {
      const int end = by_tile ? 0 : splits.begin(block + 1);
      if (splits.grain == Grain::TILE || (!by_tile && end >= splits.total)) continue;
      const DecodeCursor at =
          by_tile ? splits.find_tile(p, smem_, block) : splits.find(p, smem_, end);
      if (at.place >= at.extent.tiles) continue;
      const int begin = at.tile_begin();
      const int last = splits.grain == Grain::GROUP
                           ? at.last_group<GROUP>()
                           : at.last_partial<SOFTMAX_BLOCKS>(at.extent.first, at.extent.end);
      const bool is_begun = by_tile || (splits.begin(block) <= begin && begin < end);
      if (!is_begun || splits.owner(begin) == splits.owner(last)) continue;
      combine_tile(at);
    }
  }

  void combine_tile(DecodeCursor at) {
    const int begin = at.tile_begin();
    at.key_block = at.extent.first;
    at.position = begin;
    read_groups(at);
    ++results_[WorkTile(at)];
  }

  // Replays combine_groups() of core/decode_combine.h.
  void read_groups(const DecodeCursor& at) {
    const int groups = count_groups<GROUP>(at.extent);
    int next = at.extent.first;  // next key block to combine
    for (int number = 0; number < groups; ++number) {
      const GroupPartials partials(p, splits, at, number);
      right_ &= 1 <= partials.count && partials.count <= Splits::GROUP_PARTIALS;
      for (int i = 0; i < partials.count; ++i) read(partials.first + i, at, next);
    }
    right_ &= next == at.extent.end && GroupPartials(p, splits, at, groups).count == 0;
  }

  void read(int64_t partial, const DecodeCursor& at, int& next) {
    const auto found = written_.find(partial);
    if (found == written_.end()) {
      right_ = false;
      return;
    }
    const StoredPartial& r = found->second;
    right_ &= r.tile == WorkTile(at) && r.begin == next;
    next = r.end;
  }

  const DecodeParams& p;
  const Splits splits;
  typename Splits::Smem smem_;
  int64_t partials_;
  bool right_ = true;
  std::vector<int> key_blocks_;  // how often each key block is computed
  std::map<int64_t, StoredPartial> written_;
  std::map<WorkTile, int> results_;
};

// Number of calls that keep tiles whole although they could be split, and of calls that split
// groups.
struct Cuts {
  int kept = 0, cut = 0;
};

template <int SOFTMAX_BLOCKS>
Cuts replay(const Cache& call, int number, int& tiles, Cuts all) {
  Replay<SOFTMAX_BLOCKS> replay(call.p);
  const DecodeParams& p = call.p;
  if (!replay.is_right()) {
    std::printf(
        "call %d, partials of %d: batch %d, %d queries, capacity %d, %d splits, %d key blocks at "
        "most\n",
        number, SOFTMAX_BLOCKS, p.batch, p.seqlen_q, p.cache.capacity, p.splits, p.max_key_blocks);
  }
  tiles += replay.tiles;
  return {all.kept + replay.keeps_tiles(), all.cut + replay.cuts_groups()};
}

}  // namespace

int main() {
  int tiles = 0;
  Cuts key_blocks, parts;
  for (int i = 0; i < 4000; ++i) {
    const Cache call;
    key_blocks = replay<1>(call, i, tiles, key_blocks);
    parts = replay<LATENT_SOFTMAX_BLOCKS>(call, i, tiles, parts);
  }
  std::printf("%d work tiles, whole in %d and %d calls, cut within groups in %d and %d\n", tiles,
              key_blocks.kept, parts.kept, key_blocks.cut, parts.cut);
  return 0;
}
