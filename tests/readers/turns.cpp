// Checks the order in which blocks of keys add to a query tile's dQ (sm90/bwd_fused/work.cuh), for
// random calls. Prints each tile with an error. It is an error if the blocks' places in the order
// are not 0, 1, 2, ... in launch order, if the last block is not marked as last, or if a block that
// sees the tile has no place: a block would wait forever, or dQ would be incomplete. Then prints
// the number of tiles, of visible tiles, and of tiles at which the blocks of the first keys start
// first.
//
//   nvcc -std=c++17 -I csrc -I GENERATED turns.cpp -o turns
#include <climits>
#include <cstdio>
#include <random>
#include <vector>

#include "one_thread.h"

#include "sm90/bwd_fused/work.cuh"

using namespace flash_dist;

namespace {

constexpr int KEYS = 128;  // keys per block

struct Config {
  static constexpr int BLOCK_M = MASK_TILE, BLOCK_N = KEYS;
  static constexpr bool SHARES_QUERIES = true;
};

std::mt19937 random_bits(1);

int below(int end) { return static_cast<int>(random_bits() % static_cast<unsigned>(end)); }
int one_of(std::initializer_list<int> numbers) {
  return numbers.begin()[below(static_cast<int>(numbers.size()))];
}
int tiles_of(int rows) { return (rows + MASK_TILE - 1) / MASK_TILE; }

// A sequence, packed or not, with a band, or with a key interval per query.
struct Problem {
  BwdParams p{};
  Sequence sequence{0, 0, 0, 0};

  Problem() {
    sequence.seqlen_q = p.seqlen_q = length();
    sequence.seqlen_k = p.seqlen_k = p.key_end = length();
    p.batch = p.num_heads_kv = p.group_split = p.units = 1;
    p.members = p.group = 1 + below(2);
    p.by_num_heads_kv = p.by_group_split = make_divisor(1);
    p.query_split = one_of({1, 1, 2, 3, 7});
    const int kind = below(3);
    if (kind == 0) pack();
    if (kind == 1) {
      make_intervals();
    } else {
      const auto side = [] { return one_of({-1, -1, 0, 1, 5, 63, 64, 65, 127, 128, 300, 600}); };
      const MaskBand band = make_band(side(), side(), below(2), p.seqlen_q, p.seqlen_k);
      p.mask.kind = band.kind;
      p.mask.left = band.left;
      p.mask.right = band.right;
      p.mask.bottom_right = band.bottom_right;
    }
    p.first_keys_first = p.mask.head_planes == 0 && below(2) != 0;
  }
  Problem(const Problem&) = delete;

 private:
  std::vector<int2> rows_, key_ranges_;
  std::vector<int4> query_ranges_;
  std::vector<int> key_slots_;

  static int length() {
    return below(3) == 0 ? one_of({1, 63, 64, 65, 127, 128, 129, 192, 257, 3000}) : 1 + below(700);
  }

  // Makes the sequence part of a packed call with longer sequences.
  void pack() {
    static const int cu_seqlens[] = {0, 0};  // never read here
    p.packing = {cu_seqlens, cu_seqlens};
    p.seqlen_q += below(300);
    p.seqlen_k += below(300);
    p.key_end = p.seqlen_k;
    if (below(8) == 0) sequence.seqlen_q = 0;
    if (below(8) == 0) sequence.seqlen_k = 0;
  }

  // Makes the arrays of flash_dist/masks/intervals.py.
  void make_intervals() {
    MaskParams& mask = p.mask;
    mask.kind = MaskKind::ROWS;
    mask.left = mask.right = UNBOUNDED;
    mask.query_tiles = tiles_of(p.seqlen_q);
    mask.key_tiles = tiles_of(p.seqlen_k);
    mask.head_planes = below(2);
    for (int plane = 0; plane < (mask.head_planes == 0 ? 1 : p.group); ++plane) add_plane();
    for (int n = 0; n <= mask.key_tiles; ++n) key_slots_.push_back(n * mask.query_tiles);
    mask.rows = rows_.data();
    mask.query_ranges = query_ranges_.data();
    mask.key_ranges = key_ranges_.data();
    mask.key_slots = key_slots_.data();
  }

  void add_plane() {
    const size_t first = query_ranges_.size();
    for (int m = 0; m < p.mask.query_tiles; ++m) add_tile(m, below(4) == 0);
    for (int n = 0; n < p.mask.key_tiles; ++n) {
      int begin = p.mask.query_tiles, end = 0;
      for (int m = 0; m < p.mask.query_tiles; ++m) {
        const int4& range = query_ranges_[first + m];
        if (n < range.x / MASK_TILE || tiles_of(range.w) <= n) continue;
        begin = min(begin, m);
        end = m + 1;
      }
      key_ranges_.push_back({begin < end ? begin : 0, end});
    }
  }

  void add_tile(int m, bool empty) {
    int4 range{INT_MAX, 0, INT_MAX, 0};
    bool every = true;
    for (int i = m * MASK_TILE; i < (m + 1) * MASK_TILE; ++i) {
      int2 keys{below(p.seqlen_k), below(p.seqlen_k + 1)};
      const bool exists = i < p.seqlen_q;
      if (keys.x >= keys.y || empty || !exists) keys = {0, 0};
      rows_.push_back(keys);
      every &= keys.y > 0 || !exists;
      if (keys.y == 0) continue;
      range = {min(range.x, keys.x), max(range.y, keys.x), min(range.z, keys.y),
               max(range.w, keys.y)};
    }
    if (range.w == 0) range.x = 0;
    if (!every || range.w == 0) range.y = range.z = 0;
    query_ranges_.push_back(range);
  }
};

// The blocks' places in the order of a tile, added in launch order.
struct Turns {
  int count = 0;
  bool ends = false, right = true;

  void add(const DqOrder& turn, bool sees) {
    right &= turn.exists() || !sees;
    if (!turn.exists()) return;
    right &= turn.before == count++ && !ends;
    ends = turn.is_last;
  }
};

int tiles = 0, seen_tiles = 0, seen_from_the_first = 0;

// Adds the items of a block of keys and a query split, as its loader sees them.
void add_block(const Problem& problem, int key0, int query_split, std::vector<Turns>& turns) {
  const BwdParams& p = problem.p;
  alignas(DkdvSm90Work) char bytes[sizeof(DkdvSm90Work)] = {};
  auto& work = reinterpret_cast<DkdvSm90Work&>(bytes);
  DkdvBlock block(p, KEYS, BlockPlace(0, make_order(1, 1, 1)));
  block.key0 = key0;
  block.query_split = query_split;
  find_dkdv_work<Config>(work, p, block, problem.sequence);
  FusedCursor<Config> next(p, work, 0);  // as the loading thread iterates
  for (int i = 0; i < work.items; ++i, next.next(p, work)) {
    const FusedCursor<Config> cursor(p, work, i);  // as the threads that store dQ look up items
    if (cursor.row0() != next.row0() || cursor.head_in_group != next.head_in_group) {
      std::printf("item %d is two\n", i);
    }
    DkdvItem item{};
    item.row0 = cursor.row0();
    item.head_in_group = cursor.head_in_group;
    if (const int4* known = cursor.known(p, work)) item.known = *known;
    const bool sees =
        tile_code(p, work, item, 0) != TILE_EMPTY || tile_code(p, work, item, 1) != TILE_EMPTY;
    const int m = item.row0 / MASK_TILE;
    turns.at(item.head_in_group * tiles_of(problem.sequence.seqlen_q) + m)
        .add(find_order<KEYS>(p, work, item.known, m), sees);
  }
}

void check(const Problem& problem, int number) {
  const BwdParams& p = problem.p;
  const Sequence& sequence = problem.sequence;
  const int count = tiles_of(sequence.seqlen_q);
  std::vector<Turns> turns(p.group * count);
  const int blocks = (sequence.seqlen_k + KEYS - 1) / KEYS;
  for (int n = 0; n < blocks; ++n) {
    for (int query_split = 0; query_split < p.query_split; ++query_split) {
      add_block(problem, KEYS * (p.first_keys_first ? n : blocks - 1 - n), query_split, turns);
    }
  }
  for (int i = 0; i < p.group * count; ++i) {
    const int head_in_group = i / count, m = i % count;
    const Mask mask(p.mask, MaskPlace(p.mask, sequence, 0, head_in_group));
    const bool seen = is_visible(p, mask, ds_layout(p, sequence), m);
    ++tiles;
    seen_tiles += seen;
    seen_from_the_first += seen && p.first_keys_first;
    if (turns[i].right && turns[i].ends == seen && (turns[i].count > 0) == seen) continue;
    std::printf("call %d: %d queries, %d keys, mask %d (%d, %d, %d), %s keys first, %d stripes, ",
                number, sequence.seqlen_q, sequence.seqlen_k, static_cast<int>(p.mask.kind),
                p.mask.left, p.mask.right, p.mask.bottom_right,
                p.first_keys_first ? "first" : "last", p.query_split);
    std::printf("query head %d, tile %d\n", head_in_group, m);
  }
}

}  // namespace

int main() {
  for (int i = 0; i < 4000; ++i) check(Problem(), i);
  std::printf("%d tiles, %d seen, %d from the first keys\n", tiles, seen_tiles,
              seen_from_the_first);
  return 0;
}
