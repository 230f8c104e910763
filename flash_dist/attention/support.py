"""Checks that this build has kernels for a GPU, once for each GPU, dtype and head_dim."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from ..kernels.choices import IEEE32
from ..kernels.memory import raise_out_of_memory
from ..toolkit.errors import ExtensionError
from ..toolkit.loading.library import select
from ..toolkit.machine.installed import unsupported_error
from ..toolkit.targets.advice import describe_device
from ..toolkit.targets.devices import Device
from ..toolkit.targets.verdict import FLOOR, FLOORS
from .layouts import GENERAL_HEAD_DIM, dtype_name

if TYPE_CHECKING:
    from ..errors import FlashDistError

_log: Final = logging.getLogger(__name__)
_warned: Final[set[int]] = set()  # indices of the GPUs that have been warned about

ROLE: Final = "fwd"  # role of the forward, which is checked unless a caller names another role
LARGE_FLOOR: Final = Device(8, 0)  # least compute capability for head_dim above GENERAL_HEAD_DIM
DTYPE_NAMES: Final = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@cache
def require_kernels(  # noqa: PLR0913 - what a call asks for
    device: int,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    *,
    ieee: bool = False,
    role: str = ROLE,
    name: str = "q",
) -> None:
    """Raise if this build has no kernel for a GPU, dtype and head_dim.

    Args:
        device: Index of the GPU.
        dtype: Dtype of q.
        head_dim: Columns of q and k.
        head_dim_v: Columns of v.
        ieee: Require float32 kernels that multiply without TF32.
        role: The role of the kernels. For the role of the forward, the message of a TypeError lists
            the dtypes that the GPU supports.
        name: The caller's name of q.

    Raises:
        TypeError: The GPU has no matrix instruction for the dtype.
        ValueError: The GPU has too little shared memory for the head_dim.
        FlashDistError: This build has no code that runs on the GPU, or the code does not load. If
            `doctor` predicts this, the message is the same as that of `doctor`.
        torch.OutOfMemoryError: There is too little memory to load the code.
    """
    gpu = Device(*torch.cuda.get_device_capability(device))
    kind = IEEE32 if ieee else DTYPE_NAMES[dtype]
    if FLOOR <= gpu < FLOORS[kind]:
        if role != ROLE:
            message = f"{dtype_name(dtype)} needs compute capability {FLOORS[kind]}, got {gpu}"
            raise TypeError(message)
        able = (dtype_name(one) for one, known in DTYPE_NAMES.items() if FLOORS[known] <= gpu)
        allowed = " or ".join(able)
        message = f"{name} must be {allowed} on compute capability {gpu}, got {dtype_name(dtype)}"
        raise TypeError(message)
    if FLOOR <= gpu < LARGE_FLOOR and head_dim > GENERAL_HEAD_DIM:
        message = (
            f"head_dim must be at most {GENERAL_HEAD_DIM} on compute capability {gpu}, "
            f"got {head_dim}"
        )
        raise ValueError(message)
    try:
        selected = select(device, role=role, dtype=kind, head_dim=head_dim, head_dim_v=head_dim_v)
    except ExtensionError as error:  # @cache stores no exception, so the next call tries again
        raise_out_of_memory(error)
        raise
    chosen = next((kernel["chosen"] for kernel in selected if kernel["chosen"]), None)
    if chosen is None:
        raise _explain(device, gpu, role, [one for kernel in selected for one in kernel["refused"]])
    _log_choice(device, gpu, chosen)


def _log_choice(device: int, gpu: Device, chosen: dict[str, Any]) -> None:
    """Log the chosen variant; warn once per GPU if the driver compiles it from PTX."""
    symbol, binary = str(chosen["symbol"]), int(chosen["binary_version"])
    versions = f"binaryVersion {binary}, ptxVersion {chosen['ptx_version']}"
    _log.debug("GPU %d: the variant is %s (%s)", device, symbol, versions)
    target = symbol.rpartition("_")[2]
    if device in _warned or not (target.startswith("compute") or binary // 10 != gpu.major):
        return
    _warned.add(device)
    _log.warning(
        "GPU %d, %s, runs code for %s through the driver's compiler: this build has no machine "
        "code for it; `python -m flash_dist select` names the arch set that has",
        device,
        describe_device(gpu, torch.cuda.get_device_name(device)),
        target.replace("compute", "compute_").replace("sm", "sm_"),
    )


def _explain(device: int, gpu: Device, role: str, refused: list[dict[str, Any]]) -> FlashDistError:
    name = torch.cuda.get_device_name(device)
    predicted = unsupported_error(gpu, name=name)
    if predicted is not None:
        return predicted
    reasons = "; ".join(f"{refusal['symbol']}: {refusal['reason']}" for refusal in refused)
    reasons = reasons or "none is built in"
    message = f"no variant of kernel {role} loads on GPU {device} ({name}): {reasons}"
    return ExtensionError(message, hint="`python -m flash_dist doctor` looks for the cause")
