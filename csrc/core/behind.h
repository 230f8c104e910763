// A launch that need not wait for the end of the kernel before: ptx/dependents.cuh.
#pragma once

#include "native/entry.h"

namespace flash_dist {

// Blocks of Config's size. The kernel must call wait_for_previous() before it reads what others wrote.
// NOTE: for a kernel of little shared memory alone. How much of its memory a multiprocessor shares it
// settles when it is idle: one that needs most of it, and comes beside blocks of a small one, may get a
// place where there are three.
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
