"""torch's own attention runs on these kernels: `activate()`, once.

`torch.nn.functional.scaled_dot_product_attention`, torch's `varlen_attn`, nested tensors, context
parallelism and whatever calls these then run ours wherever torch's selector asks for flash. What
is asked of other backends stays with them; `flash_dist.sdpa()` is for that.

Like the package itself this needs torch only when a function is called, and nothing is activated
by an import.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ...errors import FlashDistError
from ...targets.devices import Device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .provider import Registration

NAME: Final = "flash_dist"
OLDEST: Final = "2.10"

CUDNN_FIRST: Final = frozenset({Device(9, 0), Device(10, 0)})  # by torch's order of backends

__all__ = ["NAME", "Status", "activate", "deactivate", "describe", "register", "status"]

_registrations: Final[list[Registration]] = []  # of which the last one may be active


@dataclass(frozen=True)
class Status:
    """Who serves torch's attention in this process; true if flash_dist is the flash backend."""

    active: str | None  # the provider that torch's registry names; None: torch's own kernels
    first: tuple[str, ...]  # what torch's selector chooses on each GPU that it sees: "cudnn_..."

    def __bool__(self) -> bool:
        return self.active == NAME

    def __str__(self) -> str:
        if self.active is None:
            said = "torch's own kernels are its flash backend"
        else:
            said = f"{self.active} is torch's flash backend"
        others = [
            f"{backend.removesuffix('_attention')} on GPU {gpu}"
            for gpu, backend in enumerate(self.first)
            if backend != "flash_attention"
        ]
        return f"{said}; torch's selector goes first to {', '.join(others)}" if others else said


def register() -> str:
    """Make the provider known to torch's registry under the name that is returned.

    `torch.nn.attention.activate_flash_attention_impl("flash_dist")` then activates it, as
    `activate()` does. Calling this again changes nothing.

    Raises:
        FlashDistError: torch is not installed or is too old.
    """
    attention = _find_registry()
    attention.register_flash_attention_impl(NAME, register_fn=_register_kernels)
    return NAME


def activate() -> None:
    """Let torch's flash backend run these kernels in this process.

    Another provider, such as FA4, gives way; one that is activated later displaces this one.
    Calling this again changes nothing.

    Raises:
        FlashDistError: torch is not installed or is too old.
        ExtensionError: The compiled extension does not load.
    """
    register()
    attention = _find_registry()
    if attention.current_flash_attention_impl() != NAME:
        attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Give torch's flash backend back to its own kernels; nothing if another provider is active."""
    attention = _find_registry()
    if attention.current_flash_attention_impl() != NAME:
        return
    if hasattr(attention, "restore_flash_attention_impl"):
        attention.restore_flash_attention_impl()
        return
    while _registrations:  # torch 2.10 knows no way back
        _registrations.pop().remove()
    attention._registry._FLASH_ATTENTION_ACTIVE = None  # noqa: SLF001 - which later versions clear


def status() -> Status:
    """Say who serves torch's attention here, as torch's settings are now.

    Where CUDA is initialised or there is a GPU, torch's selector is asked for each GPU with 16-bit
    tensors that need gradients: on compute capability 9.0 and 10.0 it prefers cuDNN unless
    `torch.use_deterministic_algorithms(True)`, `sdpa_kernel` or TORCH_CUDNN_SDPA_DEPRIORITIZED=1
    say otherwise.

    Raises:
        FlashDistError: torch is not installed or is too old.
    """
    attention = _find_registry()
    import torch  # noqa: PLC0415 - only when a function is called

    names = {int(backend): backend for backend in attention.SDPBackend.__members__.values()}
    first = []
    for gpu in range(torch.cuda.device_count()):
        query = torch.empty(1, 1, 128, 64, dtype=torch.float16, device=f"cuda:{gpu}")
        query.requires_grad_()
        chosen = torch._fused_sdp_choice(query, query, query)  # noqa: SLF001 - as torch's tests ask
        first.append(names[chosen].name.lower())
    return Status(attention.current_flash_attention_impl(), tuple(first))


def describe(devices: Iterable[Device]) -> str:
    """Say what `doctor` can of torch's attention: torch is neither imported nor asked.

    Args:
        devices: The GPUs that are here.
    """
    attention = sys.modules.get("torch.nn.attention")
    active = attention.current_flash_attention_impl() if attention is not None else None
    said = f"torch's flash backend in this process: {active or 'its own kernels'}"
    preferring = sorted(set(devices) & CUDNN_FIRST)
    if not preferring:
        return said
    where = " and ".join(map(str, preferring))
    return f"{said}; on compute capability {where} torch asks cuDNN first, unless deterministic"


def _find_registry() -> Any:  # noqa: ANN401 - a module
    """Return torch.nn.attention, which has the registry."""
    try:
        attention = import_module("torch.nn.attention")
    except ImportError as error:
        message = f"`{__name__}` needs torch, which does not import: {error}"
        raise FlashDistError(message, hint=f'`pip install "torch>={OLDEST}"`') from error
    if not hasattr(attention, "register_flash_attention_impl"):
        version = import_module("torch").__version__
        message = f"torch must be at least {OLDEST}, got {version}"
        raise FlashDistError(message, hint=f'`pip install "torch>={OLDEST}"`')
    return attention


def _register_kernels() -> Registration:
    """Do what torch's registry calls to activate a provider, and return its handle."""
    from .provider import Registration  # noqa: PLC0415 - loads torch and the extension

    registration = Registration()
    _registrations[:] = [registration]
    return registration
