"""Import a wheel, call its operator on the CPU, and provoke an error of the binding.

The text of this file runs in a folder without a source tree.
"""

import sys

import torch

import flash_dist
from flash_dist.kernels import operators, problem  # noqa: F401 - the first registers them

q, k, v = (torch.randn(2, 33, 4, 64).half() for _ in range(3))
out = flash_dist.flash_attn_func(q, k, v, causal=True)
if out.shape != q.shape or out.dtype != q.dtype or not out.isfinite().all():
    sys.exit(f"the CPU operator returned {out}")
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)  # noqa: SLF001
try:  # the GPU operator refuses CPU tensors with a C++ exception
    mask, packing = [0, -1, 0, 1], problem.NOT_PACKED
    torch.ops.flash_dist.attention.default.redispatch(cuda, q, k, v, None, mask, *packing, 0.25)
except RuntimeError as error:
    if "q must be on a GPU, got float16 [2, 33, 4, 64] on cpu" not in str(error):
        raise
else:
    sys.exit("a failing check in the binding raised nothing")
print(
    f"torch {torch.__version__}, Python {sys.version.split()[0]}: imported, the CPU operator "
    "answers, an error inside the binding arrives as RuntimeError"
)
