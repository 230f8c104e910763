// The threads of a block, each a fiber of one host thread, and their synchronization.
//
// A seed decides which thread continues, so that a missing barrier changes bits. Accesses of the
// wrappers in ptx/ to shared memory are checked as well. These are errors:
// - Two warps access the same memory without a barrier of any kind in between, and one of them
//   writes.
// - A thread accesses memory that a copy is still writing.
// - A copy reads or writes undeclared memory.
// - The lanes of a warp diverge.
// - Some threads do not reach a barrier.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

namespace emulator {

constexpr int LANES = 32;
constexpr int WARPGROUP = 128;
constexpr int MAX_OPERAND = 640;  // most bytes that a thread passes to a collective instruction

[[noreturn]] void fail(const char* format, ...);

// Declares global memory that kernels may access.
void declare(const void* data, int64_t bytes, bool may_write);
void forget_declared();

// seed() sets the seed for the order of warps, and resets the counters.
void seed(unsigned number);
int64_t bank_conflicts();

// synchronize(): barrier of the block. come_to(): arrives at numbered barrier `id` of `threads`
// threads, and waits for the others if `waits`.
void synchronize();
void come_to(int id, int threads, bool waits);

// Clusters. synchronize_cluster(): barrier of all threads. send(): stores bytes to another block's
// shared memory. The bytes arrive later and count on a barrier of that block.
void synchronize_cluster();
int cluster_rank();
void send(int rank, uint32_t target, const void* data, int bytes, uint32_t barrier);

// Barriers in shared memory that count arrivals and the bytes of boxes (ptx/mbarrier.cuh).
// arrive_behind_copies() arrives once the copies have landed that this thread has started since its
// last close_group() or arrive_behind_copies().
void make_barrier(uint32_t address, int arrivals);
void expect(uint32_t address, int bytes);
void arrive(uint32_t address, int bytes);
void arrive_remote(int rank, uint32_t address);
void arrive_behind_copies(uint32_t address);
void wait_for_phase(uint32_t address, int parity);

// Checked access to shared memory by address. by_proxy: reads as wgmma does. Such a read sees a
// thread's own writes and copies only after that thread's fence(), and copies that a barrier has
// reported only after any thread's fence().
uint8_t* read_shared(uint32_t address, int bytes, bool by_proxy = false);
uint8_t* write_shared(uint32_t address, int bytes);
void fence();
// Counts bank conflicts of eight 16-byte rows that are read at once.
void count_conflicts(const uint32_t (&rows)[8]);
// Checked access to global memory.
const uint8_t* read_global(const void* source, int bytes);
uint8_t* write_global(void* target, int bytes);

// This thread's asynchronous copies. start_copy(): 4 or 16 bytes; source null: zeros. close_group():
// makes a group of the started copies. wait_for_groups(): waits until at most `pending` groups are
// left.
void start_copy(uint32_t target, const void* source, int bytes = 16);
void close_group();
void wait_for_groups(int pending);

// start_box_copy(): adds 16 bytes to the current box, which arrives later; source null: zeros, as
// for bytes beyond `exist`.
// close_box(): ends the box.
void start_box_copy(uint32_t target, const void* source, uint32_t barrier, int exist);
void close_box();

// The threads of a collective instruction: a warp or a warpgroup.
struct Team {
  int arrived = 0, operation = 0;
  unsigned generation = 0;
  alignas(16) uint8_t in[WARPGROUP][MAX_OPERAND], out[WARPGROUP][MAX_OPERAND];
};
Team& own_team(int size);
int own_thread();
// Waits until the team's generation changes.
void wait_for_others(const Team& team);

// Runs an instruction of SIZE threads. Each passes `in`; the last one to arrive computes all(in,
// out).
template <class Out, int SIZE = LANES, class In, class All>
Out together(int operation, const In& in, All all) {
  static_assert(sizeof(In) <= MAX_OPERAND && sizeof(Out) <= MAX_OPERAND);
  Team& team = own_team(SIZE);
  const int thread = own_thread() % SIZE;
  std::memcpy(team.in[thread], &in, sizeof in);
  if (team.arrived == 0) team.operation = operation;
  if (team.operation != operation) fail("threads that belong together do different things");
  if (++team.arrived < SIZE) {
    wait_for_others(team);
  } else {
    static In ins[SIZE];
    static Out outs[SIZE];
    for (int i = 0; i < SIZE; ++i) std::memcpy(&ins[i], team.in[i], sizeof(In));
    all(ins, outs);
    for (int i = 0; i < SIZE; ++i) std::memcpy(team.out[i], &outs[i], sizeof(Out));
    team.arrived = 0;
    ++team.generation;
  }
  Out out;
  std::memcpy(&out, team.out[thread], sizeof out);
  return out;
}

enum Operation {
  SHUFFLE,
  VOTE,
  BALLOT,
  SYNC,
  LDMATRIX,
  LDMATRIX_TRANS,
  STMATRIX,
  MOVMATRIX,
  MMA,
  WGMMA
};

template <class T, class From>
T shuffle(T x, From from) {
  return together<T>(SHUFFLE, x, [&](const T(&in)[LANES], T(&out)[LANES]) {
    for (int i = 0; i < LANES; ++i) out[i] = in[from(i)];
  });
}
inline bool vote_any(bool x) {
  return together<bool>(VOTE, x, [](const bool (&in)[LANES], bool (&out)[LANES]) {
    bool any = false;
    for (bool one : in) any |= one;
    for (bool& one : out) one = any;
  });
}

}  // namespace emulator

inline void __syncthreads() { emulator::synchronize(); }
inline void __syncwarp() {
  emulator::together<int>(emulator::SYNC, 0, [](const int (&)[32], int (&out)[32]) {
    for (int& x : out) x = 0;
  });
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::shuffle(x, [=](int lane) { return lane ^ mask; });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int step) {
  return emulator::shuffle(x, [=](int lane) { return lane < step ? lane : lane - step; });
}
template <class T>
T __shfl_sync(unsigned, T x, int source) {
  struct In {
    T x;
    int source;
  };
  return emulator::together<T>(emulator::SHUFFLE, In{x, source},
                               [](const In(&in)[32], T(&out)[32]) {
                                 for (int i = 0; i < 32; ++i) out[i] = in[in[i].source].x;
                               });
}
inline unsigned __ballot_sync(unsigned, bool x) {
  return emulator::together<unsigned>(emulator::BALLOT, x,
                                      [](const bool (&in)[32], unsigned (&out)[32]) {
                                        unsigned all = 0;
                                        for (int i = 0; i < 32; ++i) all |= unsigned{in[i]} << i;
                                        for (unsigned& one : out) one = all;
                                      });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __reduce_max_sync(unsigned, int x) {
  for (int mask = 1; mask < 32; mask *= 2) {
    const int other = __shfl_xor_sync(~0u, x, mask);
    if (other > x) x = other;
  }
  return x;
}
inline int __reduce_min_sync(unsigned all, int x) { return ~__reduce_max_sync(all, ~x); }
inline bool __any_sync(unsigned, bool x) { return emulator::vote_any(x); }
inline bool __all_sync(unsigned, bool x) { return !emulator::vote_any(!x); }
