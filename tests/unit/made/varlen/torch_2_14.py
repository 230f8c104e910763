"""The choice of a backend in torch/nn/attention/varlen.py of torch 2.14.1, only reformatted.

BSD-3-Clause, (c) the PyTorch contributors: https://github.com/pytorch/pytorch/blob/v2.14.1/LICENSE
"""

# ruff: noqa: FBT001, FBT002, PLR0911, PLR0913, PLR0917, PLR1714, SIM103
# mypy: ignore-errors

from functools import lru_cache

import torch


@lru_cache(maxsize=8)
def _should_use_cudnn(device_index: int) -> bool:
    """Cache device capability check to avoid repeated CUDA calls."""
    if torch.version.hip is not None:
        return False
    cudnn_version = torch.backends.cudnn.version()
    if cudnn_version is None or cudnn_version < 91800:
        return False
    major_cap = torch.cuda.get_device_capability(device_index)[0]
    if major_cap == 9 or major_cap == 10:
        return True
    return False


def _can_use_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    max_q: int,
    window_size: list[int],
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> bool:
    if not query.is_cuda or not _should_use_cudnn(query.device.index):
        return False
    if max_q <= 128:
        return False
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.shape[-1] % 8 != 0 or value.shape[-1] % 8 != 0:
        return False
    if window_size != [-1, -1]:
        return False
    if enable_gqa or query.size(-2) != key.size(-2):
        return False
    if num_splits is not None or (block_table is not None and seqused_k is None):
        return False
    return True
