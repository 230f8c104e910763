// Launch of the kernel that reads a cache.
#pragma once

#include "core/decode_launch.h"
#include "mma/decode/kernel.cuh"
