// The C interface that every package's kernel library has. Functions return 0 (or a length) on
// success and -1 on failure. last_error() returns the message of the last failure in this thread.
#pragma once

#include <cstdint>

#include "names.h"

#define KERNEL_API extern "C" __attribute__((visibility("default")))

KERNEL_API const char* KERNEL_C(last_error)();

// The functions ..._json() write a report as JSON into buffer if size suffices. They return the
// report's length without the final NUL. They need no torch; only select_json() needs a GPU.
KERNEL_API int64_t KERNEL_C(variants_json)(char* buffer, int64_t size);
// select_json() loads the kernels that it reports. The question restricts them by the role and the
// axes of a call ("role=fwd dtype=bf16"). An empty question asks for all kernels; the
// driver then compiles PTX even for kernels that no call needs.
KERNEL_API int64_t KERNEL_C(select_json)(int device, const char* question, char* buffer,
                                         int64_t size);
KERNEL_API int64_t KERNEL_C(last_variant_json)(char* buffer, int64_t size);
// record_plans() records the host's decisions on calls, plans_json() returns them as a JSON list:
// each call, followed by the kernel of each launch. on: 1 begins an empty record of all threads of
// this process, 0 ends it. The entries are kept until the next record begins.
KERNEL_API int KERNEL_C(record_plans)(int on);
KERNEL_API int64_t KERNEL_C(plans_json)(char* buffer, int64_t size);
