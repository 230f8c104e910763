// The CUDA functions of torch that the binding uses, for a torch without CUDA. ci/dry_run/build.py
// makes the binding treat CPU tensors as GPU tensors. Workspaces are addresses that nothing
// dereferences.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

extern "C" {

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t, void** data) {
  *data = reinterpret_cast<void*>(uintptr_t{1} << 40);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void*) { return AOTI_TORCH_SUCCESS; }

AOTITorchError dry_run_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"
