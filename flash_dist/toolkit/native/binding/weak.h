// Functions of torch's stable ABI that only CUDA builds of torch define. Every file of the binding
// includes this header first: weak symbols let the binding load with a CPU build of torch. Only
// code that has a CUDA tensor calls these functions, and then torch defines them.
#pragma once

#pragma weak aoti_torch_create_cuda_guard
#pragma weak aoti_torch_create_cuda_stream_guard
#pragma weak aoti_torch_cuda_caching_allocator_raw_alloc
#pragma weak aoti_torch_cuda_caching_allocator_raw_delete
#pragma weak aoti_torch_cuda_guard_set_index
#pragma weak aoti_torch_delete_cuda_guard
#pragma weak aoti_torch_delete_cuda_stream_guard
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_c10_cuda_check_msg
#pragma weak torch_c10_cuda_free_error_msg
#pragma weak torch_cuda_stream_synchronize
#pragma weak torch_get_cuda_stream_from_pool
#pragma weak torch_get_current_cuda_blas_handle
#pragma weak torch_set_current_cuda_stream
