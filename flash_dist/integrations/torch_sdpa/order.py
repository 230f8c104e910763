"""Finds and changes the backend of torch's `varlen_attn`, which does not use the SDPA selector.

On compute capability 9.0 and 10.0, `varlen_attn` of torch 2.14 always prefers cuDNN to flash. In
torch 2.15 it prefers cuDNN unless cuDNN is disabled or `sdpa_kernel(..., set_priority=True)` sets
another order. Neither version considers deterministic mode. Before 2.14, `varlen_attn` uses flash.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

CUDNN: Final[int] = SDPBackend.CUDNN_ATTENTION.value
FLASH: Final[int] = SDPBackend.FLASH_ATTENTION.value

_SELECT: Final = "_select_backend"  # torch 2.15: returns a backend
_ASK: Final = "_can_use_cudnn"  # torch 2.14: returns a boolean
_FIXED: Final = "_should_use_cudnn"  # torch before 2.14: always returns False

_wishes: Final = {"always": False}


def find_varlen() -> ModuleType:
    """Return the module of torch that has `varlen_attn`."""
    return import_module("torch.nn.attention.varlen")


def is_known(varlen: ModuleType) -> bool:
    """Return whether we can call the function by which this version of torch chooses a backend."""
    return any(hasattr(varlen, name) for name in (_SELECT, _ASK, _FIXED))


def prefer(*, always: bool) -> None:
    """Prefer flash to cuDNN: in every call if `always`, else only in deterministic mode."""
    _wishes["always"] = always


def is_preferred() -> bool:
    """Return whether flash is preferred in every call."""
    return _wishes["always"]


def choose(varlen: ModuleType, query: torch.Tensor, max_q: int) -> str:
    """Return the backend that `varlen_attn` uses for packed sequences.

    It is "flash_attention" or "cudnn_attention", or "nothing" if both are disabled.

    Args:
        varlen: The module `torch.nn.attention.varlen`.
        query: [total_q, num_heads, head_dim]; keys and values are like it.
        max_q: Length of the longest sequence.
    """
    tensors, window = (query, query, query), [-1, -1]
    if hasattr(varlen, _SELECT):
        bounds = query.new_empty(2, dtype=torch.int32)
        try:
            backend = getattr(varlen, _SELECT)(*tensors, bounds, bounds, max_q, window)
        except RuntimeError:  # flash and cuDNN are disabled
            return "nothing"
        return "cudnn_attention" if backend == CUDNN else "flash_attention"
    asks = hasattr(varlen, _ASK) and getattr(varlen, _ASK)(*tensors, max_q, window)
    return "cudnn_attention" if asks else "flash_attention"


class Order:
    """Wrapper that applies our rule after torch's own; installed until `remove` is called."""

    def __init__(self) -> None:
        """Install the wrapper; do nothing if this version of torch has no function to wrap."""
        self._varlen = find_varlen()
        makers = {_SELECT: _put_before_select, _ASK: _put_before_ask}
        self._name = next((name for name in makers if hasattr(self._varlen, name)), "")
        if self._name:
            self._torchs = getattr(self._varlen, self._name)
            self._ours = makers[self._name](self._torchs)
            setattr(self._varlen, self._name, self._ours)

    def remove(self) -> None:
        """Restore torch's function, unless other code has replaced our wrapper."""
        prefer(always=False)
        if self._name and getattr(self._varlen, self._name) is self._ours:
            setattr(self._varlen, self._name, self._torchs)
        self._name = ""


def _put_before_select(torchs: Callable[..., int]) -> Callable[..., int]:
    def select(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> int:  # noqa: ANN401
        backend = torchs(query, key, value, *args, **options)
        is_ours = backend == CUDNN and _has_kernel(query, value) and _goes_first()
        return FLASH if is_ours else backend

    return select


def _put_before_ask(torchs: Callable[..., bool]) -> Callable[..., bool]:
    def ask(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> bool:  # noqa: ANN401
        can = torchs(query, key, value, *args, **options)
        return can and not (_has_kernel(query, value) and _goes_first())

    return ask


def _has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether flash supports tensors that cuDNN supports: head_dim_v must equal head_dim."""
    return query.shape[-1] == value.shape[-1]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _goes_first() -> bool:
    """Return whether flash is preferred to cuDNN under torch's current settings.

    Deterministic mode counts unless it only warns, as in torch's SDPA selector. A compiled graph
    stores the result as a constant, like the result of torch's own rule.
    """
    attention: Any = torch.nn.attention
    has_order = getattr(attention, "_is_sdp_priority_order_active", None)
    if (has_order is not None and has_order()) or not torch.backends.cuda.flash_sdp_enabled():
        return False
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return is_preferred()
    return is_preferred() or torch.are_deterministic_algorithms_enabled()
