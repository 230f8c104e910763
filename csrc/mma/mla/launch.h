// Launch of the kernel that reads a cache of latent keys.
#pragma once

#include "mma/decode/launch.h"
#include "mma/mla/kernel.cuh"
