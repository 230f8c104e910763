"""Run torch's own attention on these kernels: call `activate()` once.

`torch.nn.functional.scaled_dot_product_attention`, torch's `varlen_attn`, nested tensors, context
parallelism and their callers then use our kernels whenever torch's selector chooses flash. Calls
that use other backends are not affected; `flash_dist.sdpa()` replaces those, too.

Importing this module does not import torch, and activates nothing.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ...errors import FlashDistError
from ...toolkit.targets.devices import Device
from ..peers import find_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .provider import Registration

NAME: Final = "flash_dist"
OLDEST: Final = "2.10"

CUDNN_FIRST: Final = frozenset({Device(9, 0), Device(10, 0)})  # GPUs on which torch prefers cuDNN
VARLEN_CUDNN: Final = (2, 14)  # first torch whose varlen_attn prefers cuDNN by its own rule

__all__ = ["NAME", "Status", "activate", "deactivate", "describe", "register", "status"]

_registrations: Final[list[Registration]] = []  # only the last one may be active


@dataclass(frozen=True)
class Status:
    """Backends of torch's attention in this process; truthy if flash_dist is the flash backend."""

    active: str | None  # provider in torch's registry; None: torch's own kernels
    first: tuple[str, ...]  # by GPU: the selector's first choice, such as "cudnn_attention"
    varlen: tuple[str, ...] = ()  # by GPU: varlen_attn's backend; () if its rule is unknown

    def __bool__(self) -> bool:
        return self.active == NAME

    def __str__(self) -> str:
        if self.active is None:
            said = "torch's own kernels are its flash backend"
        else:
            said = f"{self.active} is torch's flash backend"
        for who, backends in ("torch's selector", self.first), ("varlen_attn", self.varlen):
            others = [
                f"{backend.removesuffix('_attention')} on GPU {gpu}"
                for gpu, backend in enumerate(backends)
                if backend != "flash_attention"
            ]
            said += f"; {who} goes first to {', '.join(others)}" if others else ""
        return said


def register() -> str:
    """Register our provider of flash kernels with torch, and return its name, `flash_dist`.

    `torch.nn.attention.activate_flash_attention_impl("flash_dist")` then activates it, as
    `activate()` does. Calling this again changes nothing.

    Raises:
        FlashDistError: torch is not installed or is too old.
    """
    attention = _find_registry()
    attention.register_flash_attention_impl(NAME, register_fn=_register_kernels)
    return NAME


def activate(*, varlen_first: bool = False) -> None:
    """Make torch's flash backend use these kernels in this process.

    This replaces any other active provider, such as FA4. A provider that is activated later
    replaces this one. Calling `activate` again only changes `varlen_first`.

    Args:
        varlen_first: Whether torch's `varlen_attn` prefers flash to cuDNN. torch 2.14 and newer
            prefer cuDNN on compute capability 9.0 and 10.0. Under
            `torch.use_deterministic_algorithms(True)` flash is always preferred. An order given by
            `sdpa_kernel(..., set_priority=True)` takes precedence.

    Raises:
        FlashDistError: torch is not installed or is too old, or its `varlen_attn` is too new for
            `varlen_first`.
        ExtensionError: The compiled extension does not load.
    """
    register()
    attention = _find_registry()
    from . import order  # noqa: PLC0415 - loads torch

    if varlen_first and not order.is_known(order.find_varlen()):
        version = import_module("torch").__version__
        message = f"varlen_first must be False with torch {version}, whose rule is new, got True"
        hint = "`with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):` around the calls"
        raise FlashDistError(message, hint=hint)
    if attention.current_flash_attention_impl() != NAME:
        attention.activate_flash_attention_impl(NAME)
    order.prefer(always=varlen_first)


def deactivate() -> None:
    """Restore torch's own kernels in its flash backend, unless another provider is active."""
    attention = _find_registry()
    if attention.current_flash_attention_impl() != NAME:
        return
    if hasattr(attention, "restore_flash_attention_impl"):
        attention.restore_flash_attention_impl()
        return
    while _registrations:  # torch 2.10 has no function that restores its kernels
        _registrations.pop().remove()
    attention._registry._FLASH_ATTENTION_ACTIVE = None  # noqa: SLF001 - later versions of torch clear it


def status() -> Status:
    """Describe the backends of torch's attention in this process, with its current settings.

    For each GPU, this calls torch's selector with 16-bit tensors that need gradients. On compute
    capability 9.0 and 10.0 the selector prefers cuDNN, unless
    `torch.use_deterministic_algorithms(True)`, `sdpa_kernel` or TORCH_CUDNN_SDPA_DEPRIORITIZED=1
    change that. If the rule of `varlen_attn` in this version of torch is known, this also calls the
    rule, for sequences of 4096 tokens without a window.

    Raises:
        FlashDistError: torch is not installed or is too old.
    """
    attention = _find_registry()
    import torch  # noqa: PLC0415 - not needed on import

    from . import order  # noqa: PLC0415 - loads torch

    names = {int(backend): backend for backend in attention.SDPBackend.__members__.values()}
    module = order.find_varlen()
    first, varlen = [], []
    for gpu in range(torch.cuda.device_count()):
        query = torch.empty(1, 1, 128, 64, dtype=torch.float16, device=f"cuda:{gpu}")
        query.requires_grad_()
        chosen = torch._fused_sdp_choice(query, query, query)  # noqa: SLF001 - as in torch's tests
        first.append(names[chosen].name.lower())
        if order.is_known(module):
            varlen.append(order.choose(module, query[0, 0].unsqueeze(1), 4096))
    return Status(attention.current_flash_attention_impl(), tuple(first), tuple(varlen))


def describe(devices: Iterable[Device], version: str = "") -> str:
    """Return doctor's text about torch's attention, without importing torch.

    Args:
        devices: The GPUs of this machine.
        version: torch's version, if known.
    """
    attention = sys.modules.get("torch.nn.attention")
    active = attention.current_flash_attention_impl() if attention is not None else None
    said = [f"torch's flash backend in this process: {active or 'its own kernels'}"]
    if preferring := sorted(set(devices) & CUDNN_FIRST):
        where = " and ".join(map(str, preferring))
        said += [f"on compute capability {where} torch asks cuDNN first, unless deterministic"]
        said += _describe_varlen(version, is_active=active == NAME)
    reasons = sys.modules.get(f"{__name__}.reasons")
    if reasons is not None and reasons.told:
        said += [f"torch's own attention was called for {', '.join(reasons.told)}"]
    return "; ".join(said)


def _describe_varlen(version: str, *, is_active: bool) -> list[str]:
    """Return a list with a phrase about varlen_attn's backend on GPUs where torch prefers cuDNN.

    The list is empty if varlen_attn of this version of torch does not prefer cuDNN.
    """
    numbers = tuple(int(x) for x in re.findall(r"\d+", version)[:2])
    if numbers < VARLEN_CUDNN:
        return []
    order = sys.modules.get(f"{__name__}.order")
    if is_active and order is not None and order.is_preferred():
        return [f"varlen_attn runs on {NAME}"]
    if is_active:
        return ["so does varlen_attn, unless `activate(varlen_first=True)`"]
    return ["so does varlen_attn, deterministic or not"]


def _find_registry() -> Any:  # noqa: ANN401 - a module
    """Return the module torch.nn.attention, which has the registry of flash providers."""
    find_names(__name__, "torch.nn.attention", "register_flash_attention_impl", oldest=OLDEST)
    return import_module("torch.nn.attention")


def _register_kernels() -> Registration:
    """Register our kernels and return their Registration; torch calls this on activation."""
    from .provider import Registration  # noqa: PLC0415 - loads torch and the extension

    registration = Registration()
    _registrations[:] = [registration]
    return registration
