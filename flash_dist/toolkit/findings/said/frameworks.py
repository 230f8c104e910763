"""Entries that explain messages of torch, torch.compile, Triton, cuBLAS, cuDNN and NCCL.

Sources: torch, Triton and the frontend of cuDNN (their error texts).
"""

from __future__ import annotations

from typing import Final

from ...product import PROGRAM
from ..entry import Entry

NOT_DETERMINISTIC: Final = Entry(
    "torch has no deterministic kernel for this operation",
    "`torch.use_deterministic_algorithms(True)` forbids kernels whose result may differ from run "
    "to run, and this operation has no other one on the GPU in this version of torch.",
    "Upgrade torch, which adds deterministic kernels, or allow this one: `warn_only=True`. "
    "Attention of this package is bit-equal from run to run, forward and backward.",
    messages=("{operation} does not have a deterministic implementation",),
    said="torch has no deterministic kernel for {operation}",
)

CUBLAS_WORKSPACE: Final = Entry(
    "cuBLAS is deterministic only with a fixed workspace",
    "`torch.use_deterministic_algorithms(True)` asks for the same bits in every run, and cuBLAS "
    "gives them once CUBLAS_WORKSPACE_CONFIG is set, before the program starts.",
    "`export CUBLAS_WORKSPACE_CONFIG=:4096:8`, or `:16:8`, which takes less memory.",
    messages=("this operation is not deterministic because it uses CuBLAS",),
)

CUBLAS_NOT_INITIALIZED: Final = Entry(
    "cuBLAS could not initialize",
    "cuBLAS needs GPU memory of its own, and none is left: torch or another process holds all of "
    "it. After the error of a kernel, such as an index outside of its tensor, it fails with the "
    "same message.",
    "Check `nvidia-smi` while it runs: if the memory is full, use a smaller batch or end the "
    "other process. Otherwise run again with CUDA_LAUNCH_BLOCKING=1, which names the faulty call.",
    messages=("CUBLAS_STATUS_NOT_INITIALIZED", "CUBLAS_STATUS_ALLOC_FAILED"),
)

CUBLAS_FAILED: Final = Entry(
    "A matrix product failed on the GPU",
    "Most often an earlier kernel failed and cuBLAS is the first to notice, or a cuBLAS of "
    "another CUDA is loaded instead of torch's (LD_LIBRARY_PATH, a system-wide CUDA).",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the faulty call. If that is the product "
    "itself, `unset LD_LIBRARY_PATH` and try again.",
    messages=("CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR"),
)

CUDNN_NO_PLAN: Final = Entry(
    "cuDNN has no kernel for this call",
    "torch chose cuDNN for a convolution or for attention, but no kernel of this cuDNN version "
    "supports the shapes, strides or GPU. A GPU that is newer than the cuDNN is the most common "
    "cause.",
    "For attention `torch.backends.cuda.enable_cudnn_sdp(False)` selects another kernel. "
    "Otherwise upgrade torch, which brings a newer cuDNN.",
    messages=("No execution plans support the graph", "No valid execution plans built"),
)

TRITON_OUT_OF_RESOURCES: Final = Entry(
    "A Triton kernel needs more than this GPU has per block",
    "Its tiles need more shared memory (or registers, tensor memory) than the limit that the "
    "message names: they were chosen for a GPU with more, such as an A100 or H100.",
    "Use smaller tiles (`BLOCK_M`, `BLOCK_N`) or fewer `num_stages`; in flex_attention by "
    '`kernel_options={"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}`. Use a version of the '
    "package that supports this GPU.",
    messages=(
        "out of resource: {resource}, Required: {required}, Hardware limit: {limit}",
        "out of resource: shared memory, Required: {required}, Hardware limit: {limit}",
        "out of resource: tensor memory, Required: {required}, Hardware limit: {limit}",
    ),
    said="a Triton kernel needs {required} per block, and this GPU has {limit}",
)

NCCL_CUDA_ERROR: Final = Entry(
    "NCCL was stopped by a CUDA error",
    "NCCL reports an error that it did not cause: a GPU that two ranks share, a kernel of this or "
    "another rank that failed, too little `/dev/shm`, or a driver that is too old for it.",
    "`export NCCL_DEBUG=WARN` and run again: its lines name the call of CUDA and its error, which "
    f"`{PROGRAM} explain MESSAGE` explains.",
    messages=("unhandled cuda error", "ncclUnhandledCudaError"),
)

TORCH_NVML: Final = Entry(
    "torch ran out of GPU memory and could not ask who holds it",
    "This line of torch counts processes on the GPU for its message `CUDA out of memory`, by NVML, "
    "which does not answer here: as under WSL, in some containers, with MIG, or after an update "
    "of the driver.",
    "Treat it as an out-of-memory error: use a smaller batch or sequence. If memory is free, "
    "`nvidia-smi` in the same container shows what is wrong with NVML.",
    messages=("NVML_SUCCESS == r INTERNAL ASSERT FAILED",),
)

NO_GRADIENT: Final = Entry(
    "Nothing in this loss requires a gradient",
    "Every tensor that it was computed from is frozen, detached, or was made under "
    "`torch.no_grad()` or `inference_mode()`. With adapters (PEFT) and gradient checkpointing the "
    "input of the first block has no gradient.",
    "`print(loss.requires_grad, [n for n, p in model.named_parameters() if p.requires_grad])` "
    "shows what is left. For PEFT call `model.enable_input_require_grads()`, or checkpoint with "
    "`use_reentrant=False`.",
    messages=("does not require grad and does not have a grad_fn",),
)

NO_DOUBLE_BACKWARD: Final = Entry(
    "This operation has no gradient of its gradient",
    "Attention kernels have a backward, but no second derivative. A gradient penalty, forces from "
    "energies, or `create_graph=True` needs one. No flash attention has it, ours included.",
    "Compute that part with torch's math backend: `with sdpa_kernel(SDPBackend.MATH):` around the "
    "attention. If you need no second derivative, remove `create_graph=True`.",
    messages=("Trying to backward through {operation} but it is not differentiable",),
    said="{operation} has no gradient of its own",
)

DYNAMO_SKIPPED: Final = Entry(
    "torch.compile reached a function that it cannot trace",
    "The function is compiled code that is not an operator of torch (pybind11, ctypes), or is on "
    "torch's list of functions that are not traced. With `fullgraph=True` that is an error, "
    "otherwise the graph ends there.",
    "Upgrade the package: newer ones register operators (flash-attn from 2.7 on). Otherwise "
    "remove `fullgraph=True`, or wrap the function by `torch.library.custom_op`.",
    messages=("Attempted to call function marked as skipped",),
)

DYNAMO_FAILED: Final = Entry(
    "A call failed while torch.compile traced it",
    "torch.compile runs the call on tensors without data, to learn its shapes, and the call "
    "raised an error. The reason is the last line of the message, not this one.",
    f"Give that last line to `{PROGRAM} explain MESSAGE`, and call the function once "
    "without torch.compile: it most often fails there too, with a shorter trace.",
    messages=("Failed running call_function {operation}",),
    said="torch.compile could not trace {operation}: the last line says why",
)

OPERATOR_UNKNOWN: Final = Entry(
    "torch knows no operator of this name",
    "The library that registers it was not loaded in this process, failed to load earlier, or has "
    "it only in another version. Names are `package::operator`.",
    "`python -c 'import NAME'` with the package of the name loads it, or shows why it does not "
    "load. In a worker process import it there too.",
    messages=("Could not find schema for {operator}",),
    said="torch knows no operator `{operator}`",
)

OPERATOR_SHARDING: Final = Entry(
    "DTensor does not know how to shard this operation",
    "The inputs are DTensors (tensor or sequence parallel), and torch has no sharding rule for "
    "the operation. Attention works on shards of heads or batch without any communication.",
    "Call it on local shards: `x.to_local()`, then `DTensor.from_local(...)`, or wrap it by "
    "`torch.distributed.tensor.experimental.local_map`.",
    messages=("Operator {operator} does not have a sharding strategy registered",),
    said="DTensor does not know how to shard {operator}",
)

PICKLE_CODE: Final = Entry(
    "An object with Python code cannot be sent or saved",
    "Nested functions, lambdas and compiled functions cannot be pickled, for example as the "
    "mask_mod of a saved mask, or an attribute of a Dataset whose workers are spawned.",
    "Define the function at the top of a module, and save its arguments instead of the function.",
    messages=("cannot pickle code objects", "cannot pickle 'code' object"),
)

SIZES_DIFFER: Final = Entry(
    "Two tensors of an operation do not have the same size",
    "Sizes must be equal, or 1, axis by axis from the right. In attention it is most often a mask "
    "that was made for another length than the keys, such as one without the tokens in the cache.",
    "Print both shapes before the line of the trace. A mask needs [.., seqlen_q, seqlen_k], where "
    "seqlen_k counts the cache.",
    messages=("The size of tensor a ({first}) must match the size of tensor b ({second})",),
    said="an axis has {first} in one tensor and {second} in the other",
)

DTYPES_DIFFER: Final = Entry(
    "The tensors of a call have different dtypes",
    "Part of the model computes in another precision: norms or rotary embeddings in float32, "
    "adapters that were loaded apart, or autocast that ends in between.",
    "Convert before the call: `q, k = q.to(v.dtype), k.to(v.dtype)`, or run the model under "
    '`torch.autocast("cuda", dtype=torch.bfloat16)`.',
    messages=(
        "Expected query, key, and value to have the same dtype",
        "query and key must have the same dtype",
        "mat1 and mat2 must have the same dtype",
        "Query/Key/Value should either all have the same dtype",
        "expected m1 and m2 to have the same dtype",
    ),
)

TORCH_WITHOUT_FLASH: Final = Entry(
    "This build of torch has no flash attention of its own",
    "It is a warning: scaled_dot_product_attention uses another of its kernels, which is correct "
    "but slower for long sequences. Some of torch's builds for Windows lack flash attention.",
    "Nothing has to be done. torch's Linux build has it, also under WSL 2.",
    messages=("Torch was not compiled with flash attention",),
)
