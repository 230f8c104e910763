"""The choice of a backend in torch/nn/attention/varlen.py of torch 2.15.0, only reformatted.

BSD-3-Clause, (c) the PyTorch contributors: https://github.com/pytorch/pytorch/blob/v2.15.0/LICENSE
"""

# ruff: noqa: C901, EM101, EM102, FBT001, PLR0912, PLR0913, PLR0917, TRY003
# mypy: ignore-errors

from contextvars import ContextVar
from functools import lru_cache

import torch
from torch._C import _SDPBackend as SDPBackend

# In torch/nn/attention/__init__.py, where `sdpa_kernel` sets it.
_sdpa_kernel_uses_priority = ContextVar("sdpa_kernel_uses_priority", default=False)


def _is_sdp_priority_order_active() -> bool:
    """Return whether an enclosing sdpa_kernel context set backend priority."""
    return _sdpa_kernel_uses_priority.get()


# Custom op schemas do not support enum arguments, so pass SDPBackend values as ints.
_FLASH_ATTENTION_BACKEND = SDPBackend.FLASH_ATTENTION.value
_CUDNN_ATTENTION_BACKEND = SDPBackend.CUDNN_ATTENTION.value
_CUDNN_SM100_FORWARD_LARGE_HEAD_DIMS = frozenset({(192, 128), (192, 192), (256, 128), (256, 256)})
_CUDNN_SM100_BACKWARD_LARGE_HEAD_DIMS = frozenset({(192, 128)})


@torch.compiler.assume_constant_result
def _get_sdp_priority_order() -> list[int]:
    """Capture varlen backend priority at trace time."""
    if _is_sdp_priority_order_active():
        return torch._C._get_sdp_priority_order()
    return [_CUDNN_ATTENTION_BACKEND, _FLASH_ATTENTION_BACKEND]


@lru_cache(maxsize=8)
@torch.compiler.assume_constant_result
def _cudnn_version_and_major_capability(device_index: int) -> tuple[int | None, int]:
    """Cache cuDNN and device capability queries used by backend selection."""
    return torch.backends.cudnn.version(), torch.cuda.get_device_capability(device_index)[0]


@lru_cache(maxsize=8)
@torch.compiler.assume_constant_result
def _should_use_cudnn(device_index: int) -> bool:
    """Cache device capability check to avoid repeated CUDA calls."""
    if torch.version.hip is not None:
        return False
    cudnn_version, major_cap = _cudnn_version_and_major_capability(device_index)
    return cudnn_version is not None and cudnn_version >= 91800 and major_cap in (9, 10)


def _cudnn_version(query: torch.Tensor) -> int:
    """Return the cuDNN runtime version, or 0 when cuDNN is unavailable."""
    if not query.is_cuda:
        return 0
    cudnn_version, _ = _cudnn_version_and_major_capability(query.device.index)
    return cudnn_version or 0


@lru_cache(maxsize=8)
@torch.compiler.assume_constant_result
def _cudnn_decode_disabled(device_index: int) -> bool:
    """Cache whether cuDNN decode (max_q == 1) is disabled on this device."""
    with torch.cuda.device(device_index):
        return torch._C._is_cudnn_attention_decode_disabled()


def _cudnn_supports_head_dims(
    query: torch.Tensor, value: torch.Tensor, needs_backward: bool
) -> bool:
    """Return whether cuDNN supports this varlen head-dimension combination."""
    dims = (query.shape[-1], value.shape[-1])
    if dims[0] <= 128 and dims[1] <= 128:
        return True
    if not query.is_cuda:
        return False
    cudnn_version, major_cap = _cudnn_version_and_major_capability(query.device.index)
    if cudnn_version is None or major_cap != 10:
        return False
    if not needs_backward:
        return cudnn_version >= 92400 and dims in _CUDNN_SM100_FORWARD_LARGE_HEAD_DIMS
    return cudnn_version >= 91900 and dims in _CUDNN_SM100_BACKWARD_LARGE_HEAD_DIMS


def _cudnn_rejection_reasons(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    window_size: list[int],
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> list[str]:
    """Return the constraints preventing cuDNN varlen attention."""
    reasons = []
    if not query.is_cuda:
        reasons.append("query must be on CUDA")
    elif not _should_use_cudnn(query.device.index):
        reasons.append("cuDNN >= 9.18 on SM90 or SM100 is required")
    # cuDNN 9.24 is the oldest release validated for max_q <= 128 and for the
    # bottom-right causal alignment that KV caches require.
    cudnn_version = _cudnn_version(query)
    if max_q <= 128 and cudnn_version < 92400:
        reasons.append("max_q <= 128 requires cuDNN >= 9.24")
    elif max_q == 1 and query.is_cuda and _cudnn_decode_disabled(query.device.index):
        reasons.append("decode (max_q == 1) is disabled for this cuDNN version")
    if query.dtype not in (torch.float16, torch.bfloat16):
        reasons.append("query dtype must be float16 or bfloat16")
    if query.shape[-1] % 8 != 0 or value.shape[-1] % 8 != 0:
        reasons.append("query and value head dimensions must be divisible by 8")
    needs_backward = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (query, key, value)
    )
    if not _cudnn_supports_head_dims(query, value, needs_backward):
        phase = "backward" if needs_backward else "forward"
        reasons.append(
            f"query/value head dimensions {(query.shape[-1], value.shape[-1])} "
            f"are unsupported for cuDNN varlen {phase}"
        )
    if window_size == [-1, 0]:
        # cuDNN aligns the causal diagonal to the bottom right of a KV cache,
        # matching Flash for any lengths, but to the top left of packed
        # sequences, which only matches Flash when Q and K share lengths.
        if seqused_k is not None:
            if cudnn_version < 92400:
                reasons.append("causal attention with a KV cache requires cuDNN >= 9.24")
        elif cu_seq_q is not cu_seq_k:
            reasons.append(
                "causal attention requires seqused_k or the same cu_seq tensor for Q and K"
            )
    elif window_size != [-1, -1]:
        reasons.append("window_size must be (-1, -1) or causal (-1, 0)")
    if num_splits is not None:
        reasons.append("num_splits is not supported")
    if block_table is not None:
        page_size = key.size(1)
        if page_size <= 0 or page_size & (page_size - 1):
            reasons.append("paged KV requires a power-of-two page size")
        if seqused_k is None:
            reasons.append("block_table requires seqused_k")
    return reasons


def _select_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    window_size: list[int],
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> int:
    """Select the first eligible varlen backend in the SDPA priority order."""
    cudnn_enabled = torch._C._get_cudnn_sdp_enabled()
    flash_enabled = torch._C._get_flash_sdp_enabled()
    cudnn_reasons = (
        _cudnn_rejection_reasons(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            window_size,
            seqused_k,
            block_table,
            num_splits,
        )
        if cudnn_enabled
        else []
    )
    cudnn_eligible = cudnn_enabled and not cudnn_reasons
    for backend in _get_sdp_priority_order():
        if backend == _CUDNN_ATTENTION_BACKEND and cudnn_eligible:
            return backend
        if backend == _FLASH_ATTENTION_BACKEND and flash_enabled:
            return backend
    if cudnn_enabled:
        constraints = "\n  - ".join(cudnn_reasons)
        raise RuntimeError(
            "SDPBackend.CUDNN_ATTENTION was requested for varlen_attn, but its "
            f"constraints are not satisfied:\n  - {constraints}"
        )
    raise RuntimeError(
        "No viable backend for varlen_attn. Enable SDPBackend.FLASH_ATTENTION "
        "or SDPBackend.CUDNN_ATTENTION with sdpa_kernel()."
    )
