"""The registered operators: the only module that knows `torch.ops.flash_dist`.

Importing it loads the extension. CUDA kernels are registered by the extension, the CPU reference
and the fake kernels (shapes only, for torch.compile) here. The signatures are the operators' own,
flags among the positional arguments included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from .errors import ExtensionError
from .reference import reference_backward, reference_forward

EXTENSION: Final = Path(__file__).resolve().parent / "_C.abi3.so"

# The file has no Python API of its own (building it needs no Python headers): loading it registers
# the operators.
try:
    torch.ops.load_library(str(EXTENSION))
except OSError as error:
    _MESSAGE = f"the compiled extension does not load: {error}"
    raise ExtensionError(_MESSAGE, hint="`python -m flash_dist doctor` finds the cause") from error

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor]


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,  # noqa: FBT001 - the operator's schema
) -> tuple[Tensor, Tensor]:
    """Return out [batch, seqlen_q, num_heads_q, head_dim], lse [batch, num_heads_q, seqlen_q]."""
    out, lse = torch.ops.flash_dist.fwd(q, k, v, softmax_scale, causal)
    return out, lse


def bwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    causal: bool,  # noqa: FBT001 - the operator's schema
    budget: int,
) -> Gradients:
    """Return dq, dk, dv, each like its tensor; budget in bytes."""
    dq, dk, dv = torch.ops.flash_dist.bwd(
        dout, q, k, v, out, lse, dlse, softmax_scale, causal, budget
    )
    return dq, dk, dv


@torch.library.register_fake("flash_dist::fwd")
def _fwd_fake(
    q: Tensor,
    k: Tensor,  # noqa: ARG001 - the operator's schema
    v: Tensor,  # noqa: ARG001
    softmax_scale: float,  # noqa: ARG001
    causal: bool,  # noqa: ARG001, FBT001
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads_q, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((batch, num_heads_q, seqlen_q), dtype=lse_dtype)


@torch.library.register_fake("flash_dist::bwd")
def _bwd_fake(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # noqa: ARG001
    lse: Tensor,  # noqa: ARG001
    dlse: Tensor | None,  # noqa: ARG001
    softmax_scale: float,  # noqa: ARG001
    causal: bool,  # noqa: ARG001, FBT001
    budget: int,  # noqa: ARG001
) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.impl("flash_dist::fwd", "CPU")
def _fwd_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,  # noqa: FBT001 - the operator's schema
) -> tuple[Tensor, Tensor]:
    return reference_forward(q, k, v, softmax_scale=softmax_scale, causal=causal)


@torch.library.impl("flash_dist::bwd", "CPU")
def _bwd_cpu(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    causal: bool,  # noqa: FBT001
    budget: int,  # noqa: ARG001 - nothing is spilled here
) -> Gradients:
    return reference_backward(
        dout, q, k, v, out, lse, dlse, softmax_scale=softmax_scale, causal=causal
    )
