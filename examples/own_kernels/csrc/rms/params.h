// The arguments of the kernels. All tensors are contiguous.
#pragma once

#include <cstdint>

namespace own_kernels {

struct RmsParams {
  const void* x;       // [rows, hidden]
  const void* weight;  // [hidden]
  void* out;           // [rows, hidden]
  float* rstd;         // [rows]
  int64_t rows;
  int hidden;
  float eps;
  // filled in by the host code
  bool aligned;  // every row of every tensor begins at a multiple of 16 bytes
  int sm_count;
};

struct RmsBwdParams {
  const void* dout;    // [rows, hidden]
  const void* x;       // [rows, hidden]
  const void* weight;  // [hidden]
  const float* rstd;   // [rows], of the forward
  void* dx;            // [rows, hidden]
  int64_t rows;
  int hidden;
  // filled in by the host code
  bool aligned;
  int blocks;
  float* partial;  // [blocks, hidden]: dweight of the rows of each block
};

struct RmsDweightParams {
  const float* partial;  // [blocks, hidden]
  void* dweight;         // [hidden]
  int blocks;
  int hidden;
};

}  // namespace own_kernels
