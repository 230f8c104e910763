// The C interface of libown_kernels_kernels.so. Each function returns 0, or -1 with a sentence in
// own_kernels_last_error(). All pointers of params are memory of call->device.
#pragma once

#include "native/call.h"
#include "native/report.h"
#include "rms/params.h"

// Writes out and rstd.
KERNEL_API int own_kernels_rms(const own_kernels::Call* call, const own_kernels::RmsParams* params);

// Writes dx and dweight [hidden]. Calls allocate at most once.
KERNEL_API int own_kernels_rms_bwd(const own_kernels::Call* call,
                                   const own_kernels::RmsBwdParams* params, void* dweight,
                                   own_kernels::Allocate allocate, void* context);
