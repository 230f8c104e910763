// The part of csrc/ptx/semaphore.cuh that emulated kernels use, in the emulator, which runs blocks one
// after the other.
#pragma once

namespace flash_dist {

template <class Number>
Number fetch_next(Number* counter) {
  return (*counter)++;
}

// NOTE: a block that waits for a later one would wait forever.
inline int load_acquire(const int* semaphore) { return *semaphore; }
inline void add_release(int* semaphore) { ++*semaphore; }

}  // namespace flash_dist
