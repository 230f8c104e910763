// A family that exists in tests only: the general forward under another name, for one target, with
// a plan of more shared memory than it uses, which refuses odd numbers of queries. It shows what
// the dispatcher does with two families of one role.
#pragma once

#include "mma/fwd/kernel.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct TestFwdConfig : FwdConfig<Target, T, HEAD_DIM, HEAD_DIM_V, 64> {};

template <class Config>
const char* refuses_odd(const void* params) {
  return static_cast<const FwdParams*>(params)->seqlen_q % 2 == 0 ? nullptr
                                                                  : "seqlen_q must be even";
}

}  // namespace flash_dist
