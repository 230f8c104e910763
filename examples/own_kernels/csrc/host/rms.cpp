// The launches behind forward and backward. The dispatcher chooses each kernel.
#include "host/api.h"

#include <algorithm>
#include <initializer_list>
#include <sstream>

#include "native/check.h"
#include "native/dispatch.h"
#include "native/recording.h"
#include "native/status.h"

namespace own_kernels {

namespace {

bool is_aligned(int hidden, std::initializer_list<const void*> tensors) {
  bool aligned = hidden % 8 == 0;
  for (const void* one : tensors) aligned &= reinterpret_cast<uintptr_t>(one) % 16 == 0;
  return aligned;
}

// Launches the kernel of a role for the dtype and the columns of a call, or fails with a sentence
// that names the built kernels.
template <class Params>
Loaded find(const Call& call, Role role, const Params& p) {
  return require_kernel(call.device, {role, {call.dtype, p.hidden}}, &p);
}

template <class Params>
void launch_on(const Call& call, const Loaded& kernel, const Params& p) {
  launch(call.device, kernel, &p, static_cast<cudaStream_t>(call.stream));
}

// Adds everything that determines the bits of dweight to the plan that the selftest records.
void record_backward(const RmsBwdParams& p) {
  if (!is_recording()) return;
  std::ostringstream entry;
  entry << "{\"call\": \"rms_bwd\", \"rows\": " << p.rows << ", \"hidden\": " << p.hidden
        << ", \"blocks\": " << p.blocks << "}";
  record(entry.str());
}

void run_forward(const Call& call, RmsParams p) {
  const DeviceScope scope(call.device);
  p.aligned = is_aligned(p.hidden, {p.x, p.weight, p.out});
  p.sm_count = device_info(call.device).sm_count;
  launch_on(call, find(call, Role::RMS, p), p);
}

void run_backward(const Call& call, RmsBwdParams p, void* dweight, Allocate allocate,
                  void* context) {
  const DeviceScope scope(call.device);
  p.aligned = is_aligned(p.hidden, {p.dout, p.x, p.weight, p.dx});
  const Loaded kernel = find(call, Role::RMS_BWD, p);
  // p.blocks is the number of blocks that run at a time, but at most the number of rows.
  const int most = device_info(call.device).sm_count * kernel.variant->entry->blocks_per_sm;
  p.blocks = static_cast<int>(std::min<int64_t>(p.rows, most));
  const int64_t bytes = int64_t{p.blocks} * p.hidden * static_cast<int64_t>(sizeof(float));
  if (bytes != 0) p.partial = static_cast<float*>(allocate(context, bytes));
  if (bytes != 0 && p.partial == nullptr) {
    fail(memory_words(cudaErrorMemoryAllocation), "rms_bwd could not allocate ", bytes,
         " bytes on GPU ", call.device);
  }
  record_backward(p);
  launch_on(call, kernel, p);
  const RmsDweightParams sums{p.partial, dweight, p.blocks, p.hidden};
  launch_on(call, find(call, Role::RMS_DWEIGHT, sums), sums);
}

}  // namespace

}  // namespace own_kernels

using namespace own_kernels;

int own_kernels_rms(const Call* call, const RmsParams* params) {
  return guarded([&] {
    run_forward(*call, *params);
    return 0;
  });
}

int own_kernels_rms_bwd(const Call* call, const RmsBwdParams* params, void* dweight,
                        Allocate allocate, void* context) {
  return guarded([&] {
    run_backward(*call, *params, dweight, allocate, context);
    return 0;
  });
}
