// The threads of a block, each a fiber of one host thread, and what they do together.
//
// Who goes on is drawn from a seed, so that a missing barrier shows as other bits. Shared memory that
// the wrappers of ptx/ touch is watched beside that: two warps between the same barriers, of which
// one writes, are an error, as is whoever touches what cp.async is still bringing. So are a copy from
// or to what nobody has declared, lanes of a warp that do different things, and barriers that not
// all threads come to.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

namespace emulator {

constexpr int LANES = 32;
constexpr int MAX_OPERAND = 48;  // bytes of what a lane brings to an instruction of its warp

[[noreturn]] void fail(const char* format, ...);

// Memory that kernels may touch.
void declare(const void* data, int64_t bytes, bool may_write);
void forget_declared();

// What chooses the order of warps, and what was counted since.
void seed(unsigned number);
int64_t bank_conflicts();

// A barrier of the block.
void synchronize();

// Shared memory, by its address: the place, watched.
uint8_t* read_shared(uint32_t address, int bytes);
uint8_t* write_shared(uint32_t address, int bytes);
// Eight rows of 16 bytes that are read at once.
void count_conflicts(const uint32_t (&rows)[8]);
// Global memory, checked.
const uint8_t* read_global(const void* source, int bytes);
uint8_t* write_global(void* target, int bytes);

// Of this thread: a copy of 16 bytes, source null: of zeros; what began becomes a group; all but so
// many groups are there.
void start_copy(uint32_t target, const void* source);
void close_group();
void wait_for_groups(int pending);

struct Warp {
  int arrived, operation;
  unsigned generation;
  alignas(16) uint8_t in[LANES][MAX_OPERAND], out[LANES][MAX_OPERAND];
};
Warp& own_warp();
int own_lane();
// Goes on when the warp's generation is another.
void wait_for_lanes(unsigned generation);

// An instruction of all lanes: each brings `in`, the last to come computes all(in, out).
template <class Out, class In, class All>
Out together(int operation, const In& in, All all) {
  static_assert(sizeof(In) <= MAX_OPERAND && sizeof(Out) <= MAX_OPERAND);
  Warp& warp = own_warp();
  const int lane = own_lane();
  std::memcpy(warp.in[lane], &in, sizeof in);
  if (warp.arrived == 0) warp.operation = operation;
  if (warp.operation != operation) fail("lanes of a warp do different things");
  if (++warp.arrived < LANES) {
    wait_for_lanes(warp.generation);
  } else {
    In ins[LANES];
    Out outs[LANES];
    for (int i = 0; i < LANES; ++i) std::memcpy(&ins[i], warp.in[i], sizeof(In));
    all(ins, outs);
    for (int i = 0; i < LANES; ++i) std::memcpy(warp.out[i], &outs[i], sizeof(Out));
    warp.arrived = 0;
    ++warp.generation;
  }
  Out out;
  std::memcpy(&out, warp.out[lane], sizeof out);
  return out;
}

enum Operation { SHUFFLE, VOTE, SYNC, LDMATRIX, LDMATRIX_TRANS, MMA };

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
// NOTE: of all lanes the same source, which is how the kernels call it.
template <class T>
T __shfl_sync(unsigned, T x, int source) {
  return emulator::shuffle(x, [=](int) { return source; });
}
inline bool __any_sync(unsigned, bool x) { return emulator::vote_any(x); }
inline bool __all_sync(unsigned, bool x) { return !emulator::vote_any(!x); }
