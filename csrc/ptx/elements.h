// Element types, as tags: the kernels move raw 16-bit words and only the ptx wrappers look inside.
#pragma once

#include "native/target.h"

namespace flash_dist {

struct Fp16 {};
struct Bf16 {};
struct Fp32 {};
struct Ieee32 {};  // fp32 whose products are FFMA on every target

}  // namespace flash_dist
