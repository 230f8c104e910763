// Programmatic dependent launch: a kernel that may start before the previous one ends
// (ptx/dependents.cuh).
#pragma once

#include "native/entry.h"

namespace flash_dist {

// Launches blocks of Config's size. The kernel must call wait_for_previous() before it reads what others
// wrote. NOTE: only for a kernel of little shared memory. A multiprocessor chooses its shared-memory size
// when it is idle: a kernel that needs most of it, and starts beside blocks of a small one, may get one
// block per multiprocessor where three fit.
template <class Config>
cudaError_t launch_behind(const void* kernel, const void* params, dim3 blocks,
                          cudaStream_t stream) {
  void* arguments[] = {const_cast<void*>(params)};
  if constexpr (Config::Target::NUMBER < 90) {
    return cudaLaunchKernel(kernel, blocks, dim3(Config::THREADS), arguments, Config::SMEM_BYTES,
                            stream);
  } else {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const auto config = launch_config(blocks, Config::THREADS, Config::SMEM_BYTES, stream, early);
    return cudaLaunchKernelExC(&config, kernel, arguments);
  }
}

}  // namespace flash_dist
