// Tags for element types. The kernels move raw 16-bit words; only the ptx wrappers interpret them.
#pragma once

#include "native/target.h"

namespace flash_dist {

struct Fp16 {};
struct Bf16 {};
struct Fp32 {};
struct Ieee32 {};  // fp32 multiplied with FFMA on every target

}  // namespace flash_dist
