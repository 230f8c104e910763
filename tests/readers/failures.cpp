// Runs the host code on a CUDA runtime that fails on request. Each input line "call count code"
// makes the count-th call of the function `call` fail once, with that code. The program prints one
// JSON object per line. Code 0 has special meanings: for cudaFuncGetAttributes, a kernel has
// another register count; for cudaOccupancyMaxActiveClusters, no cluster fits. Sizes may follow
// after a semicolon: batch seqlen_q seqlen_k num_heads_kv group total_q (packed if >= 0) budget
// dtype softcap seqlen_new. With seqlen_new the calls are decode and append, with a cache of
// capacity seqlen_k.
//
//   g++ -std=c++17 -I csrc -I GENERATED -I CUDA/include failures.cpp csrc/host/*.cpp -o failures
//
// Each line runs in its own process, which makes the same calls twice on GPU 1 while GPU 0 is
// current. The kernels are those of GENERATED/variants.inc; none of them runs.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "host/capi.h"
#include "native/dispatch.h"
#include "plans.h"

namespace {

constexpr int REGISTERS = 168;  // registers of families whose warpgroups reallocate them

std::string failing;  // function that fails, and the number of its failing call
int failing_at = 0;
cudaError_t failing_with = cudaSuccess;

std::map<std::string, int> calls;
std::vector<std::string> launched;
cudaError_t last_error = cudaSuccess;
int current_device = 0;

cudaError_t answer(const char* function) {
  const int count = ++calls[function];
  const bool fails = function == failing && count == failing_at;
  return fails ? last_error = failing_with : cudaSuccess;
}

cudaError_t launch_kernel(const flash_dist::KernelEntry& entry, const void*, cudaStream_t stream) {
  return cudaLaunchKernel(entry.kernel, dim3(1), dim3(128), nullptr, 0, stream);
}

bool first_keys_first = false;  // of the last launch of the fused kernel

cudaError_t launch_fused(const flash_dist::KernelEntry& entry, const void* params,
                         cudaStream_t stream) {
  first_keys_first = static_cast<const flash_dist::BwdParams*>(params)->first_keys_first;
  return launch_kernel(entry, params, stream);
}

// Refuses long sequences, for the only kernel that has a limit on lengths.
const char* refuse_longer(const void* params) {
  const auto& p = *static_cast<const flash_dist::BwdParams*>(params);
  return std::max(p.seqlen_q, p.seqlen_k) > 64 ? "a tile does not hold a sequence" : nullptr;
}

// Families with score modification serve only calls with a modification; the other families serve
// only calls without one.
template <class Params, bool SCORED>
const char* refuse_scores(const void* params) {
  const bool has_score_mod = static_cast<const Params*>(params)->scores.has_score_mod;
  return has_score_mod == SCORED ? nullptr : "scores are modified, or not";
}

using Refusal = const char* (*)(const void*);

constexpr Refusal refusal_of(flash_dist::Role role, flash_dist::Family family) {
  using flash_dist::BwdParams, flash_dist::Family, flash_dist::FwdParams;
  switch (family) {
    case Family::FWD_SM90:
      return &refuse_scores<FwdParams, false>;
    case Family::FWD_SCORED_SM90:
      return &refuse_scores<FwdParams, true>;
    case Family::BWD_DKDV_SM90:
    case Family::BWD_FUSED_SM90:
      return &refuse_scores<BwdParams, false>;
    case Family::BWD_DKDV_SCORED_SM90:
    case Family::BWD_FUSED_SCORED_SM90:
      return &refuse_scores<BwdParams, true>;
    default:
      return role == flash_dist::Role::BWD_WHOLE ? &refuse_longer : nullptr;
  }
}

}  // namespace

#define KERNEL_VARIANT(symbol, role, family, specific, plan, number, suffix, ptx, ...)        \
  extern "C" const flash_dist::KernelEntry symbol##_entry;                                    \
  const flash_dist::KernelEntry symbol##_entry = {                                            \
      &symbol##_entry,                                                                        \
      flash_dist::Role::role == flash_dist::Role::BWD_FUSED ? &launch_fused : &launch_kernel, \
      128,                                                                                    \
      plan == 0 ? 0 : 64 * 1024,                                                              \
      64,                                                                                     \
      2,                                                                                      \
      specific ? 2 : 1,                                                                       \
      false,                                                                                  \
      refusal_of(flash_dist::Role::role, flash_dist::Family::family),                         \
      specific ? REGISTERS : 0};
#include "variants.inc"
#undef KERNEL_VARIANT

// --- The runtime ------------------------------------------------------------------------------

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return answer("cudaGetDevice");
}

cudaError_t cudaSetDevice(int device) {
  const cudaError_t status = answer("cudaSetDevice");
  if (status == cudaSuccess) current_device = device;
  return status;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "H200");
  properties->major = 9;
  return answer("cudaGetDeviceProperties");
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = 50 << 20;  // cudaDevAttrL2CacheSize
  if (which == cudaDevAttrMultiProcessorCount) *value = 132;
  if (which == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = 232448;
  return answer("cudaDeviceGetAttribute");
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->binaryVersion = 90;
  const cudaError_t status = answer("cudaFuncGetAttributes");
  const bool other = failing == "cudaFuncGetAttributes" && failing_with == cudaSuccess &&
                     calls["cudaFuncGetAttributes"] == failing_at;
  attributes->numRegs = other ? REGISTERS - 8 : REGISTERS;
  return status;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return answer("cudaFuncSetAttribute");
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  const cudaError_t status = answer("cudaOccupancyMaxActiveClusters");
  const bool none = failing == "cudaOccupancyMaxActiveClusters" && failing_with == cudaSuccess &&
                    calls["cudaOccupancyMaxActiveClusters"] == failing_at;
  *clusters = none ? 0 : 1;
  return status;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  const cudaError_t status = answer("cudaLaunchKernel");
  if (status != cudaSuccess) return status;
  for (const flash_dist::Variant& v : flash_dist::all_variants()) {
    if (v.entry->kernel == kernel) launched.push_back(v.symbol);
  }
  return status;
}

cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return answer("cudaMemsetAsync"); }

// Acts as a driver without tensor maps.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  *result = cudaDriverEntryPointSymbolNotFound;
  return answer("cudaGetDriverEntryPointByVersion");
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorName(cudaError_t status) {
  static std::string text;
  text = "error " + std::to_string(status);
  return text.c_str();
}

const char* cudaGetErrorString(cudaError_t) { return "as it was told to"; }

// --- Two attempts -----------------------------------------------------------------------------

namespace {

using namespace flash_dist;

void* allocate(void* context, int64_t bytes) {
  static_cast<std::vector<uint8_t>*>(context)->resize(bytes);
  return static_cast<std::vector<uint8_t>*>(context)->data();
}

int batch = 2, seqlen_q = 1000, seqlen_k = 1000, num_heads_kv = 1, group = 4, total_q = -1;
int64_t budget = int64_t{64} << 20;
int dtype = static_cast<int>(Dtype::BF16);
float softcap = 0;
int seqlen_new = -1;  // -1: forward and backward
int head_dim = 64, left = UNBOUNDED, right = UNBOUNDED, batch_invariant = 0;  // fwd and bwd

template <class Params>
Params make_params() {
  Params p{};
  p.batch = batch;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.num_heads_kv = num_heads_kv;
  p.group = group;
  p.total_q = total_q;
  if (total_q >= 0) p.packing = {&total_q, &total_q};  // no kernel reads the values
  p.head_dim = p.head_dim_v = head_dim;
  p.mask.left = left;
  p.mask.right = right;
  p.scores.softcap = softcap;
  return p;
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) result += c == '\n' ? std::string("\\n") : std::string(1, c);
  return result + "\"";
}

CacheParams make_cache() {
  CacheParams cache{};
  cache.entries = batch;
  cache.page = cache.capacity = seqlen_k;
  cache.seqlen_new = seqlen_new;
  return cache;
}

DecodeParams make_decode() {
  DecodeParams p{};
  p.cache = make_cache();
  p.batch = batch;
  p.seqlen_q = seqlen_q;
  p.num_heads_kv = num_heads_kv;
  p.group = group;
  p.head_dim = p.head_dim_v = 64;
  p.left = p.right = UNBOUNDED;
  return p;
}

AppendParams make_append() {
  AppendParams p{};
  p.cache = make_cache();
  p.batch = batch;
  p.seqlen_q = seqlen_q;
  p.num_heads_kv = num_heads_kv;
  p.num_heads_q = num_heads_kv * group;
  p.head_dim = p.head_dim_v = 64;
  return p;
}

// Makes the calls. Returns the error of each failed call, and every launched kernel.
std::string attempt() {
  launched.clear();
  calls.clear();
  std::ostringstream errors, kernels, counts;
  const char* separator = "";
  const auto tell = [&](int status) {
    if (status == 0) return;
    errors << separator << quoted(flash_dist_last_error());
    separator = ", ";
  };
  const Call call{1, nullptr, dtype};
  std::vector<uint8_t> workspace;
  if (seqlen_new >= 0) {
    const DecodeParams decode = make_decode();
    tell(flash_dist_decode(&call, &decode, budget, &allocate, &workspace));
    const AppendParams append = make_append();
    tell(flash_dist_append(&call, &append));
  } else {
    const auto forward = make_params<FwdParams>();
    tell(flash_dist_fwd(&call, &forward, nullptr, nullptr));
    const auto grads = make_params<BwdParams>();
    const DeltaParams delta{};
    const BwdOptions options{budget, batch_invariant, nullptr};
    tell(flash_dist_bwd(&call, &delta, &grads, &options, &allocate, &workspace));
  }
  separator = "";
  for (const std::string& symbol : launched) {
    kernels << separator << quoted(symbol);
    separator = ", ";
  }
  separator = "";
  for (const auto& [function, count] : calls) {
    counts << separator << quoted(function) << ": " << count;
    separator = ", ";
  }
  std::ostringstream text;
  text << "{\"errors\": [" << errors.str() << "], \"launched\": [" << kernels.str()
       << "], \"calls\": {" << counts.str() << "}, \"left_behind\": " << last_error
       << ", \"device\": " << current_device
       << ", \"first_keys_first\": " << (first_keys_first ? "true" : "false") << "}";
  last_error = cudaSuccess;
  current_device = 0;
  return text.str();
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::cout.flush();
    const pid_t child = fork();
    if (child == 0) {
      int code = 0;
      std::istringstream(line) >> failing >> failing_at >> code;
      std::istringstream sizes(line.substr(line.find(';') + 1));
      if (line.find(';') != std::string::npos) {
        sizes >> batch >> seqlen_q >> seqlen_k >> num_heads_kv >> group >> total_q >> budget >>
            dtype >> softcap;
        if (int given = 0; sizes >> given) seqlen_new = given;
        if (int given = 0; sizes >> given) head_dim = given;
        if (int given = 0; sizes >> given) left = given;
        if (int given = 0; sizes >> given) right = given;
        if (int given = 0; sizes >> given) batch_invariant = given;
      }
      failing_with = static_cast<cudaError_t>(code);
      std::cout << "[" << attempt();
      failing.clear();
      std::cout << ", " << attempt() << "]" << std::endl;
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) return 1;
  }
  return 0;
}
