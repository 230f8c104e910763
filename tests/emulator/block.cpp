#include "block.h"

#include <ucontext.h>

#include <array>
#include <cstdarg>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

#include "core/decode.h"
#include "cuda_runtime_api.h"
#include "roles.h"
#include "sm90/bwd_bias/config.h"
#include "sm90/bwd_halves/config.h"
#include "sm90/fwd/config.h"
#include "sm90/fwd_kvcache/config.h"
#include "sm90/mla/config.h"

uint3 threadIdx, blockIdx;
dim3 gridDim, blockDim;

namespace flash_dist {
alignas(1024) uint8_t smem_bytes[256 << 10];  // named as in the kernels
}

namespace emulator {

namespace {

using flash_dist::smem_bytes;
using Kernel = std::function<void()>;

constexpr size_t STACK_BYTES = 256 << 10;
constexpr int NOBODY = -1, SEVERAL = -2;

struct Copy {
  uint32_t target;
  const void* source;
  int bytes = 16;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  const unsigned* awaited = nullptr;  // the thread continues once *awaited differs from `seen`
  unsigned seen = 0;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::vector<uint32_t> unfenced;  // words written since this thread's last fence
};

// State of 4 bytes of shared memory: the last accesses, with the block's count of barriers at that
// time, and a pending copy.
struct Word {
  int writer = NOBODY, reader = NOBODY, copier = NOBODY;
  unsigned written = 0, read = 0;
  bool fenced = true;
};

// A barrier of some threads, in shared memory or numbered. Counts arrivals and the bytes of
// expected boxes.
struct Barrier {
  int arrivals = 0, missing = 0;
  int64_t bytes = 0;
  unsigned phase = 0;  // the open phase
  struct Later {
    int thread;
    std::vector<Copy> copies;
  };
  std::vector<Later> later;  // arrivals that wait for copies
};

struct Range {
  const uint8_t* begin;
  int64_t bytes;
  bool may_write;
};

// 16 bytes of a box, or up to 16 bytes that another block of the cluster has sent.
struct BoxCopy {
  Copy copy;
  uint32_t barrier;
  int bytes = 16, exist = bytes;  // the bytes behind those that exist become zeros
};

struct Block {
  const Kernel* kernel;
  std::vector<Thread> threads;
  std::vector<Team> warps, warpgroups;
  std::vector<Word> words;
  size_t smem;
  int alive, arrived = 0;
  unsigned barriers = 1;                 // barriers that all threads of the block have passed
  unsigned epoch = 1;                    // barriers of any kind that were passed
  std::map<uint32_t, Barrier> counting;  // barriers in shared memory, by address
  std::map<int, Barrier> numbered;
  std::vector<uint32_t> landed;  // words written by completed copies, not fenced yet
  std::vector<std::vector<BoxCopy>> boxes;
  std::vector<BoxCopy> box;
  int rank;                                      // rank in the cluster
  std::vector<uint8_t> image;                    // its shared memory while another block runs
  std::deque<std::array<uint8_t, 16>> received;  // data that other blocks have sent
};

// Blocks that run concurrently, and their common barriers.
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  int first, arrived = 0;
  unsigned barriers = 1;
};

std::vector<Range> ranges;
std::mt19937 random_order;
int64_t conflicts = 0;
Cluster* cluster = nullptr;
Block* block = nullptr;
int current = 0;
ucontext_t scheduler;
std::string problem;

void pass_block() {
  block->arrived = 0;
  ++block->barriers;
  ++block->epoch;
}

void run_thread() {
  try {
    (*block->kernel)();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  Thread& own = block->threads[current];
  own.done = true;
  if (--block->alive > 0 && block->arrived == block->alive) pass_block();
  swapcontext(&own.context, &scheduler);
}

void wait_for(const unsigned* number) {
  Thread& own = block->threads[current];
  own.awaited = number;
  own.seen = *number;
  swapcontext(&own.context, &scheduler);
}

bool can_run(const Thread& thread) {
  return !thread.done && (thread.awaited == nullptr || *thread.awaited != thread.seen);
}

void resume(int number) {
  current = number;
  threadIdx = {static_cast<unsigned>(number), 0, 0};
  block->threads[number].awaited = nullptr;
  swapcontext(&scheduler, &block->threads[number].context);
  if (!problem.empty()) throw std::runtime_error(problem);
}

// Runs a warp until none of its lanes can continue.
bool run_warp(int warp) {
  bool ran = false;
  for (bool again = true; again;) {
    again = false;
    for (int i = warp * LANES; i < (warp + 1) * LANES; ++i) {
      if (!can_run(block->threads[i])) continue;
      resume(i);
      again = ran = true;
    }
  }
  return ran;
}

Barrier& barrier_at(uint32_t address) {
  const auto found = block->counting.find(address);
  if (found == block->counting.end()) fail("there is no barrier at %u", address);
  return found->second;
}

// Ends the phase if all threads and all bytes have arrived.
void end_phase(Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes > 0) return;
  barrier.missing = barrier.arrivals;
  ++barrier.phase;
  ++block->epoch;
}

void count_arrival(Barrier& barrier) {
  if (--barrier.missing < 0)
    fail("more arrive at a barrier than the %d it is for", barrier.arrivals);
  end_phase(barrier);
}

void write_copied(const Copy& copy, int bytes) {
  if (copy.source == nullptr) {
    std::memset(smem_bytes + copy.target, 0, bytes);
  } else {
    std::memcpy(smem_bytes + copy.target, copy.source, bytes);
  }
}

// Completes a copy of a thread.
void land(const Copy& copy, int thread) {
  for (int i = 0; i < copy.bytes / 4; ++i) {
    Word& word = block->words[copy.target / 4 + i];
    word.copier = NOBODY;
    word.writer = thread / LANES;
    word.written = block->epoch;
    word.fenced = false;
  }
  write_copied(copy, copy.bytes);
}

// Delivers a random requested box, or data that another block has sent. wgmma may read the
// delivered bytes without a fence, as after TMA.
void bring_box() {
  auto& boxes = block->boxes;
  std::swap(boxes[random_order() % boxes.size()], boxes.back());
  for (const BoxCopy& one : boxes.back()) {
    for (int i = 0; i < one.bytes / 4; ++i) {
      Word& word = block->words[one.copy.target / 4 + i];
      word.copier = NOBODY;
      word.fenced = true;
    }
    write_copied(one.copy, one.exist);
    std::memset(smem_bytes + one.copy.target + one.exist, 0, one.bytes - one.exist);
    Barrier& barrier = barrier_at(one.barrier);
    barrier.bytes -= one.bytes;
    end_phase(barrier);
  }
  boxes.pop_back();
}

std::unique_ptr<Block> make_block(const Kernel& kernel, int threads, size_t smem, int rank) {
  auto made = std::make_unique<Block>();
  Block& own = *made;
  own.kernel = &kernel;
  own.threads.resize(threads);
  own.warps = std::vector<Team>(threads / LANES);
  own.warpgroups = std::vector<Team>(threads / WARPGROUP);
  own.words.resize(smem / 4);
  own.smem = smem;
  own.alive = threads;
  own.rank = rank;
  own.image.assign(smem, 0xff);  // NaN in every number format
  for (Thread& thread : own.threads) {
    thread.stack = std::make_unique<char[]>(STACK_BYTES);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK_BYTES;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, &run_thread, 0);
  }
  return made;
}

// Swaps in the shared memory of another block of the cluster.
void enter(Block& next) {
  if (block == &next) return;
  if (block != nullptr) std::memcpy(block->image.data(), smem_bytes, block->smem);
  block = &next;
  std::memcpy(smem_bytes, next.image.data(), next.smem);
  blockIdx.x = static_cast<unsigned>(cluster->first + next.rank);
}

// Runs each warp once, in random order. Returns true if any could continue.
bool run_warps(Block& own) {
  enter(own);
  std::vector<int> order(own.warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), random_order);
  bool ran = false;
  for (int warp : order) {
    ran |= run_warp(warp);
    // Deliver boxes rarely, so that a missing wait shows.
    if (!own.boxes.empty() && random_order() % 64 == 0) bring_box(), ran = true;
  }
  if (!ran && !own.boxes.empty()) bring_box(), ran = true;
  return ran;
}

void run_cluster(const Kernel& kernel, int threads, size_t smem, int first, int count) {
  Cluster own{};
  own.first = first;
  cluster = &own;
  block = nullptr;
  for (int rank = 0; rank < count; ++rank) {
    own.blocks.push_back(make_block(kernel, threads, smem, rank));
  }
  const auto runs = [](const auto& one) { return one->alive > 0; };
  while (std::any_of(own.blocks.begin(), own.blocks.end(), runs)) {
    bool ran = false;
    for (const auto& one : own.blocks) {
      // Run only some of the blocks each time, so that others fall behind.
      if (one->alive > 0 && (count == 1 || !ran || random_order() % 2 == 0)) ran |= run_warps(*one);
    }
    if (!ran) throw std::runtime_error("threads wait for others that do not come");
  }
  for (const auto& one : own.blocks) {
    for (const auto& [id, barrier] : one->numbered) {
      if (barrier.missing > 0) {
        throw std::runtime_error("a block ends before all come to barrier " + std::to_string(id));
      }
    }
    if (!one->boxes.empty()) throw std::runtime_error("a block ends before a box comes");
  }
}

const Range& range_of(const void* data, int bytes) {
  const auto* begin = static_cast<const uint8_t*>(data);
  if (reinterpret_cast<uintptr_t>(data) % bytes != 0) fail("%p is no multiple of %d", data, bytes);
  for (const Range& range : ranges) {
    if (range.begin <= begin && begin + bytes <= range.begin + range.bytes) return range;
  }
  fail("block %d, thread %d: %p is in no tensor", blockIdx.x, current, data);
}

Word* words_of(uint32_t address, int bytes) {
  if (address % bytes != 0 || address + bytes > block->smem) {
    fail("shared memory has no %d bytes at %u", bytes, address);
  }
  return &block->words[address / 4];
}

void leave_unfenced(Word& word) {
  word.fenced = false;
  block->threads[current].unfenced.push_back(static_cast<uint32_t>(&word - block->words.data()));
}

void watch_write(Word& word, int warp) {
  const unsigned now = block->epoch;
  const bool other_wrote = word.written == now && word.writer != warp;
  const bool other_read = word.read == now && word.reader != warp;
  if (other_wrote || other_read) {
    fail("warp %d writes what another %s since the last barrier", warp,
         other_wrote ? "has written" : "has read");
  }
  word.writer = warp;
  word.written = now;
}

// Starts a copy, or one of zeros if source is null. exist: the bytes that are read.
void reserve(uint32_t target, const void* source, int bytes, int exist) {
  const auto* from = static_cast<const uint8_t*>(source);
  const int step = exist == bytes ? bytes : 2;  // a part may have any even number of bytes
  for (int i = 0; source != nullptr && i < exist; i += step) read_global(from + i, step);
  Word* words = words_of(target, bytes);
  for (int i = 0; i < bytes / 4; ++i) {
    if (words[i].copier != NOBODY) fail("thread %d copies where a copy is on its way", current);
    watch_write(words[i], current / LANES);
    words[i].copier = current;
  }
}

}  // namespace

void fail(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw std::runtime_error(text);
}

void declare(const void* data, int64_t bytes, bool may_write) {
  ranges.push_back({static_cast<const uint8_t*>(data), bytes, may_write});
}
void forget_declared() { ranges.clear(); }

void seed(unsigned number) {
  random_order.seed(number);
  conflicts = 0;
}
int64_t bank_conflicts() { return conflicts; }

Team& own_team(int size) {
  return (size == LANES ? block->warps : block->warpgroups)[current / size];
}
int own_thread() { return current; }
void wait_for_others(const Team& team) { wait_for(&team.generation); }

void synchronize() {
  if (++block->arrived == block->alive) {
    pass_block();
  } else {
    wait_for(&block->barriers);
  }
}

void come_to(int id, int threads, bool waits) {
  Barrier& barrier = block->numbered[id];
  if (barrier.missing == 0) barrier.arrivals = barrier.missing = threads;
  if (barrier.arrivals != threads)
    fail("barrier %d is for %d threads and for %d", id, barrier.arrivals, threads);
  if (--barrier.missing > 0) {
    if (waits) wait_for(&barrier.phase);
    return;
  }
  ++barrier.phase;
  ++block->epoch;
}

void synchronize_cluster() {
  const int all = static_cast<int>(cluster->blocks.size() * block->threads.size());
  if (++cluster->arrived < all) return wait_for(&cluster->barriers);
  cluster->arrived = 0;
  ++cluster->barriers;
  for (const auto& one : cluster->blocks) ++one->epoch;
}
int cluster_rank() { return block->rank; }

void send(int rank, uint32_t target, const void* data, int bytes, uint32_t barrier) {
  Block& to = *cluster->blocks[rank];
  if (to.alive == 0) fail("thread %d sends to a block that has ended", current);
  to.received.emplace_back();
  std::memcpy(to.received.back().data(), data, bytes);
  for (int i = 0; i < bytes / 4; ++i) {
    int& copier = to.words[target / 4 + i].copier;
    if (copier != NOBODY) fail("thread %d sends where a copy is on its way", current);
    copier = current;
  }
  to.boxes.push_back({{{target, to.received.back().data()}, barrier, bytes}});
}

void make_barrier(uint32_t address, int arrivals) {
  words_of(address, 8);
  Barrier& barrier = block->counting[address];
  barrier.arrivals = barrier.missing = arrivals;
}
void expect(uint32_t address, int bytes) { barrier_at(address).bytes += bytes; }
void arrive(uint32_t address, int bytes) {
  expect(address, bytes);
  count_arrival(barrier_at(address));
}
void arrive_remote(int rank, uint32_t address) {
  Block* own = block;
  block = cluster->blocks[rank].get();
  if (block->alive == 0) fail("a thread arrives at a barrier of a block that has ended");
  count_arrival(barrier_at(address));
  block = own;
}
void arrive_behind_copies(uint32_t address) {
  Thread& own = block->threads[current];
  barrier_at(address).later.push_back({current, std::move(own.open)});
  own.open.clear();
}
void wait_for_phase(uint32_t address, int parity) {
  Barrier& barrier = barrier_at(address);
  const auto is_open = [&] { return static_cast<int>(barrier.phase % 2) == parity; };
  while (is_open()) {
    const std::vector<Barrier::Later> later = std::move(barrier.later);
    barrier.later.clear();
    for (const auto& [thread, copies] : later) {
      for (const Copy& copy : copies) {
        land(copy, thread);
        for (int i = 0; i < copy.bytes / 4; ++i) block->landed.push_back(copy.target / 4 + i);
      }
      count_arrival(barrier);
    }
    if (is_open()) wait_for(&barrier.phase);
  }
}

uint8_t* read_shared(uint32_t address, int bytes, bool by_proxy) {
  Word* words = words_of(address, bytes);
  const int warp = current / LANES;
  for (int i = 0; i < bytes / 4; ++i) {
    Word& word = words[i];
    if (word.copier != NOBODY) fail("thread %d reads what a copy is bringing", current);
    if (by_proxy && !word.fenced) fail("wgmma reads what no fence has made visible");
    if (word.written == block->epoch && word.writer != warp) {
      fail("warp %d reads what another has written since the last barrier", warp);
    }
    const bool alone = word.read != block->epoch || word.reader == warp;
    word.reader = alone ? warp : SEVERAL;
    word.read = block->epoch;
  }
  return smem_bytes + address;
}

uint8_t* write_shared(uint32_t address, int bytes) {
  Word* words = words_of(address, bytes);
  for (int i = 0; i < bytes / 4; ++i) {
    if (words[i].copier != NOBODY) fail("thread %d writes where a copy is on its way", current);
    watch_write(words[i], current / LANES);
    leave_unfenced(words[i]);
  }
  return smem_bytes + address;
}

void fence() {
  Thread& own = block->threads[current];
  for (uint32_t word : own.unfenced) block->words[word].fenced = true;
  own.unfenced.clear();
  for (uint32_t word : block->landed) block->words[word].fenced = true;
  block->landed.clear();
}

void count_conflicts(const uint32_t (&rows)[8]) {
  unsigned groups = 0;
  for (uint32_t row : rows) groups |= 1u << (row / 16 % 8);
  conflicts += groups != 0xff;
}

const uint8_t* read_global(const void* source, int bytes) {
  return range_of(source, bytes).begin == nullptr ? nullptr : static_cast<const uint8_t*>(source);
}
uint8_t* write_global(void* target, int bytes) {
  if (!range_of(target, bytes).may_write) fail("%p is written, which is only read", target);
  return static_cast<uint8_t*>(target);
}

void start_copy(uint32_t target, const void* source, int bytes) {
  reserve(target, source, bytes, bytes);
  block->threads[current].open.push_back({target, source, bytes});
}

void close_group() {
  Thread& own = block->threads[current];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}

void wait_for_groups(int pending) {
  Thread& own = block->threads[current];
  while (own.groups.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : own.groups.front()) {
      land(copy, current);
      for (int i = 0; i < copy.bytes / 4; ++i) own.unfenced.push_back(copy.target / 4 + i);
    }
    own.groups.pop_front();
  }
}

void start_box_copy(uint32_t target, const void* source, uint32_t barrier, int exist) {
  reserve(target, source, 16, exist);
  block->box.push_back({{target, source}, barrier, 16, exist});
}

void close_box() {
  block->boxes.push_back(std::move(block->box));
  block->box.clear();
}

}  // namespace emulator

namespace flash_dist {

const char* find_map_problem(const View& view, int, int, const Axes&) {
  const bool fits = (view.row | view.head_group | view.head_kv | view.batch) % 8 == 0 &&
                    reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  return fits ? nullptr : "it does not begin, or a stride is not, at a multiple of 16 bytes";
}

cudaError_t make_map(CUtensorMap* map, AxisSteps* steps, const View& view, Dtype, int rows,
                     int columns, const Axes& axes, int box_rows) {
  *map = {CUtensorMap::MARK, static_cast<const uint16_t*>(view.data),
          view.row,          view.head_group,
          view.head_kv,      view.batch,
          columns,           rows,
          axes.members,      axes.heads_kv,
          axes.batches,      box_rows};
  *steps = {view.head_group != 0, view.head_kv != 0, view.batch != 0};
  return cudaSuccess;
}

}  // namespace flash_dist

namespace {

template <class Params>
void call_with(const void* kernel, const void* params) {
  reinterpret_cast<void (*)(Params)>(const_cast<void*>(kernel))(
      *static_cast<const Params*>(params));
}

using CallWith = void (*)(const void* kernel, const void* params);

int cluster_blocks = 1;  // cluster size of the current launch

// Returns the function that calls a kernel of a role. Forward kernels have parameters of several
// types.
CallWith find_call(flash_dist::Role role, bool has_one, bool has_more, bool has_bias) {
  using namespace flash_dist;
  switch (role) {
    case Role::BWD_DELTA:
      return call_with<DeltaParams>;
    case Role::BWD_DKDV:
      return call_with<DkdvHalvesSm90Params>;
    case Role::BWD_FUSED:
      return call_with<DkdvBiasSm90Params>;
    case Role::BWD_BIAS:
      return call_with<BiasGradientSm90Params>;
    case Role::BWD_DQ_GEMM:
      return call_with<DqSm90Params>;
    case Role::BWD_REDUCE:
      return call_with<ReduceParams>;
    default:
      return has_bias                         ? call_with<FwdBiasSm90Params>
             : has_more && cluster_blocks > 1 ? call_with<FwdSm90Params>
             : has_more                       ? call_with<FwdKvcacheSm90Params>
             : has_one                        ? call_with<MlaSm90Params>
                                              : call_with<DecodeParams>;
  }
}

}  // namespace

namespace emulator {
flash_dist::Role role;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& one = config->attrs[i];
    if (one.id == cudaLaunchAttributeClusterDimension) {
      cluster_blocks = static_cast<int>(one.val.clusterDim.x);
    }
  }
  const cudaError_t status = cudaLaunchKernel(kernel, config->gridDim, config->blockDim, arguments,
                                              config->dynamicSmemBytes, config->stream);
  cluster_blocks = 1;
  return status;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 threads, void** arguments,
                             size_t smem, cudaStream_t) {
  gridDim = grid;
  blockDim = threads;
  using namespace flash_dist;
  const auto* maps = static_cast<const CUtensorMap*>(arguments[0]);
  const bool has_one = maps[0].mark == CUtensorMap::MARK;
  const bool has_more = has_one && maps[1].mark == CUtensorMap::MARK;
  const bool has_bias =
      has_more && static_cast<const FwdSm90Params*>(arguments[0])->p.bias.data != nullptr;
  const auto call = find_call(emulator::role, has_one, has_more, has_bias);
  const auto run = [&] { call(kernel, arguments[0]); };
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; x += cluster_blocks) {
      blockIdx = {x, y, 0};
      emulator::run_cluster(run, static_cast<int>(threads.x), smem, static_cast<int>(x),
                            cluster_blocks);
    }
  }
  return cudaSuccess;
}
