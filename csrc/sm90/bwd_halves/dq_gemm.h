// The dQ kernel in which each block computes half of the columns.
#pragma once

#include "sm90/bwd/dq_gemm.cuh"
#include "sm90/bwd_halves/config.h"
