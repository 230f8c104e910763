// Launch of the kernel that reads a cache of latent keys.
#pragma once

#include "core/decode_launch.h"
#include "mma/mla/kernel.cuh"
