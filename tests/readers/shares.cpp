// The splits of attention to a cache (core/decode_work.cuh), replayed share by share like the
// kernels, and task by task like the combine kernels, for sequences of random lengths. Prints each
// call in which a unit is not computed exactly once, a record is outside of the workspace or
// written twice, the combine kernel reads an unwritten record, a task does not have exactly one
// result, or its units are not the visible ones. Then it prints the number of tasks.
//
//   nvcc -std=c++17 -Xcompiler=-fno-access-control -I csrc -I GENERATED shares.cpp -o shares
#include <cstdio>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "one_thread.h"

#include "core/decode_fold.h"

using namespace flash_dist;

namespace {

std::mt19937 random_bits(1);

int below(int end) { return static_cast<int>(random_bits() % static_cast<unsigned>(end)); }
int one_of(std::initializer_list<int> numbers) {
  return numbers.begin()[below(static_cast<int>(numbers.size()))];
}

// A call, with the arrays that its parameters point to.
struct Cache {
  DecodeParams p{};
  std::vector<int> seqlens, leftpad, cu_seqlens_q{0}, cu_seqlens_k{0};

  Cache() {
    p.batch = 1 + below(9);
    p.num_heads_kv = one_of({1, 2, 3, 8});
    p.group = one_of({1, 2, 3, 8, 17});
    p.seqlen_q = one_of({1, 1, 2, 5, 16, 17, 64, 100, 300});
    p.task_rows = one_of({16, 64});
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
    share_out();
  }
  Cache(const Cache&) = delete;

 private:
  // A cache, with packed queries, or packed sequences with few queries.
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

  // As in host/decode.cpp, for GPUs and budgets of all sizes.
  void share_out() {
    const int rows = p.group * (p.few_alone ? min(p.seqlen_q, MORE_QUERIES) : p.seqlen_q);
    p.row_tiles = (rows + p.task_rows - 1) / p.task_rows;
    p.tile_rows = min(rows, p.task_rows);
    p.by_group = make_divisor(p.group);
    p.by_tiles = make_divisor(p.row_tiles);
    const int longest = max((p.cache.capacity + UNIT_KEYS - 1) / UNIT_KEYS, 1);
    const int units = longest * p.batch * p.row_tiles * p.num_heads_kv;
    p.shares = min(one_of({1, 2, 3, 7, 132, 264, 1000}), units);
    const bool may_split = p.cache.capacity > UNIT_KEYS && p.shares > 1;
    p.tiles_differ = below(4);
    p.max_units = !may_split ? 0 : below(4) == 0 ? below(units + 1) : units;
  }
};

// A tile of rows of a kv head of a batch entry.
struct Task {
  int batch, place, head;

  explicit Task(const DecodeCursor& at) : batch(at.batch), place(at.place), head(at.head) {}
  bool operator<(const Task& other) const {
    return std::tie(batch, place, head) < std::tie(other.batch, other.place, other.head);
  }
  bool operator==(const Task& other) const { return !(*this < other) && !(other < *this); }
};

// Content of a record: units of a task.
struct Record {
  Task task;
  int begin, end;
};

template <int PART_UNITS>
class Replay {
  using Shares = DecodeShares<1, PART_UNITS>;  // of one thread, which counts all sequences

 public:
  explicit Replay(const DecodeParams& params) : p(params), shares(count(params)) {
    const bool rests = p.cache.capacity > UNIT_KEYS * PART_UNITS;
    const int least = rests ? p.shares * resting_records(PART_UNITS) : 0;  // for any budget
    records_ = p.max_units == 0 ? least : decode_records(p.max_units, p.shares, PART_UNITS);
    units_.resize(shares.total);
  }

  bool is_right() {
    for (int share = 0; share < p.shares; ++share) compute(share);
    if (p.max_units > 0) fold();
    for (const int times : units_) right_ &= times == 1;
    for (int b = 0; b < p.batch; ++b) {
      const int tiles = DecodeExtent(p, {b, 0}).tiles;
      for (int place = 0; place < tiles; ++place) right_ &= has_seen_units({b, place});
      tasks += tiles * p.num_heads_kv;
    }
    for (const auto& [task, times] : results_) right_ &= times == 1;
    return right_ && static_cast<int>(results_.size()) == tasks;
  }

  // Whether tasks stay unsplit although their parts would fit.
  bool keeps_tasks() const { return shares.grain == Grain::TASK && shares.total <= p.max_units; }
  bool cuts_groups() const { return shares.grain == Grain::PART; }

  int tasks = 0;

 private:
  // Whether a tile's units are the range from the first to the last visible one, or a single one.
  bool has_seen_units(RowTile own) const {
    const DecodeExtent extent(p, own);
    const CacheKeys keys(p.cache, own.batch, p.batch);
    const int shift = p.bottom_right ? keys.seqlen - extent.seqlen_q : 0;
    int first = INT32_MAX, end = 0;
    for (int i = 0; i < p.task_rows; ++i) {
      const int query = (extent.tile_at(p, own.place) * p.task_rows + i) / p.group;
      if (query >= extent.seqlen_q) break;
      const int64_t begin = int64_t{shift} + query - p.left,
                    last = int64_t{shift} + query + p.right;
      const auto from = p.left >= UNBOUNDED ? 0 : std::max<int64_t>(begin, 0);
      const auto to = p.right >= UNBOUNDED ? keys.seqlen : std::min<int64_t>(last + 1, keys.seqlen);
      if (from >= to) continue;
      first = std::min<int>(first, from / UNIT_KEYS);
      end = std::max<int>(end, (to - 1) / UNIT_KEYS + 1);
    }
    if (!p.tiles_differ) return extent.first <= first && end <= extent.end;
    return end == 0 ? extent.units() == 1 : extent.first == first && extent.end == end;
  }

  // The work of the constructor with all threads of a block.
  static Shares count(const DecodeParams& p) {
    alignas(Shares) char bytes[sizeof(Shares)] = {};
    Shares& s = reinterpret_cast<Shares&>(bytes);
    for (RowTile own{0, 0}; own.batch < p.batch; own.advance(p))
      s.mine_ += Shares::units_of(p, own);
    s.total = s.mine_;
    s.each_ = s.total / p.shares;
    s.more_ = s.total % p.shares;
    const bool whole_tasks = PART_UNITS > 1 && s.prefers_tasks(Shares::lengths_of(p));
    s.grain = s.choose_grain(p, s.total > p.max_units || whole_tasks);
    return s;
  }

  // As in decode_block(), mla_block() and mla_sm90_block().
  void compute(int share) {
    int begin, end;
    DecodeCursor at;
    if (!shares.find_share(p, smem_, share, at, begin, end)) return;
    int first = at.unit, part = at.unit;  // of the group so far, of the part
    for (int left = end - begin; left > 0; --left, at.advance(p)) {
      ++units_[at.position];
      if (at.position == at.group_begin()) first = at.unit;
      if (at.position == at.part_begin<PART_UNITS>()) part = at.unit;
      if (at.position + 1 < at.part_end<PART_UNITS>()) continue;
      const bool owns_task = begin <= at.task_begin() && at.task_end() <= end;
      if (at.group_begin() < begin || end < at.group_end()) {
        right_ &= !owns_task;
        write(shares.part_record(p, at) + at.unit % GROUP_UNITS / PART_UNITS, at, part);
      } else if (at.position + 1 < at.group_end()) {
        right_ &= PART_UNITS == 1;  // others have a group in one part
      } else if (!owns_task) {
        write(shares.group_record(p, at, share), at, first);
      } else if (at.position + 1 < at.task_end()) {
        rest(share);
      } else {
        ++results_[Task(at)];
      }
    }
  }

  // Partial results of a share after a group: in its own records, if it has any.
  void rest(int share) { right_ &= resting_records(PART_UNITS) * (share + 1) <= records_; }

  void write(int64_t record, const DecodeCursor& at, int first) {
    right_ &= resting_records(PART_UNITS) * p.shares <= record && record < records_;
    right_ &= written_.insert({record, {Task(at), first, at.unit + 1}}).second;
  }

  // As in decode_fold_block().
  void fold() {
    const int most = p.batch * p.row_tiles * p.num_heads_kv;
    const bool by_task = most <= p.shares;
    for (int block = 0; block < min(most, p.shares); ++block) {
      const int end = by_task ? 0 : shares.begin(block + 1);
      if (shares.grain == Grain::TASK || (!by_task && end >= shares.total)) continue;
      const DecodeCursor at =
          by_task ? shares.find_task(p, smem_, block) : shares.find(p, smem_, end);
      if (at.place >= at.extent.tiles) continue;
      const int begin = at.task_begin();
      const int last = shares.grain == Grain::GROUP
                           ? at.last_group()
                           : at.last_part<PART_UNITS>(at.extent.first, at.extent.end);
      const bool is_begun = by_task || (shares.begin(block) <= begin && begin < end);
      if (!is_begun || shares.owner(begin) == shares.owner(last)) continue;
      fold_task(at);
    }
  }

  void fold_task(DecodeCursor at) {
    const int begin = at.task_begin();
    at.unit = at.extent.first;
    at.position = begin;
    read_groups(at);
    ++results_[Task(at)];
  }

  // As in fold_groups() of core/decode_fold.h.
  void read_groups(const DecodeCursor& at) {
    const int groups = count_groups(at.extent);
    int next = at.extent.first;  // next unit to combine
    for (int number = 0; number < groups; ++number) {
      const GroupRecords records(p, shares, at, number);
      right_ &= 1 <= records.parts && records.parts <= Shares::PARTS;
      for (int i = 0; i < records.parts; ++i) read(records.first + i, at, next);
    }
    right_ &= next == at.extent.end && GroupRecords(p, shares, at, groups).parts == 0;
  }

  void read(int64_t record, const DecodeCursor& at, int& next) {
    const auto found = written_.find(record);
    if (found == written_.end()) {
      right_ = false;
      return;
    }
    const Record& r = found->second;
    right_ &= r.task == Task(at) && r.begin == next;
    next = r.end;
  }

  const DecodeParams& p;
  const Shares shares;
  typename Shares::Smem smem_;
  int64_t records_;
  bool right_ = true;
  std::vector<int> units_;  // number of computations of each
  std::map<int64_t, Record> written_;
  std::map<Task, int> results_;
};

// Calls in which tasks stay unsplit although they could be split, and those with split groups.
struct Cuts {
  int kept = 0, cut = 0;
};

template <int PART_UNITS>
Cuts replay(const Cache& call, int number, int& tasks, Cuts all) {
  Replay<PART_UNITS> replay(call.p);
  const DecodeParams& p = call.p;
  if (!replay.is_right()) {
    std::printf(
        "call %d in parts of %d: batch %d, %d queries, capacity %d, %d shares, %d units at most\n",
        number, PART_UNITS, p.batch, p.seqlen_q, p.cache.capacity, p.shares, p.max_units);
  }
  tasks += replay.tasks;
  return {all.kept + replay.keeps_tasks(), all.cut + replay.cuts_groups()};
}

}  // namespace

int main() {
  int tasks = 0;
  Cuts units, parts;
  for (int i = 0; i < 4000; ++i) {
    const Cache call;
    units = replay<1>(call, i, tasks, units);
    parts = replay<LATENT_PART_UNITS>(call, i, tasks, parts);
  }
  std::printf("%d tasks, kept in %d and %d calls, cut within groups in %d and %d\n", tasks,
              units.kept, parts.kept, units.cut, parts.cut);
  return 0;
}
