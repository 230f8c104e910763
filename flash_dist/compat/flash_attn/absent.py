"""Errors for names of flash_attn and flash_mla that are not supported."""

from __future__ import annotations

import dis
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_PRIVATE: Final = (
    "other versions have it with other arguments\n\n"
    "hint: `return_lse=True` returns lse, and `flash_dist.merge_attention` puts parts together"
)
_OTHERS: Final = (
    "FlashMLA's takes other arguments than flash-attention's\n\n"
    "hint: `flash_dist` has the latter by this name"
)
_REASONS: Final = {
    "_flash_attn_backward": _PRIVATE,
    "_flash_attn_forward": _PRIVATE,
    "_flash_attn_varlen_backward": _PRIVATE,
    "_flash_attn_varlen_forward": _PRIVATE,
    "flash_attn_varlen_func": _OTHERS,
    "flash_attn_varlen_kvpacked_func": _OTHERS,
    "flash_attn_varlen_qkvpacked_func": _OTHERS,
    "flash_mla_sparse_fwd": "there are no kernels for selected keys",
}


def refuse(module: str, name: str, served: Iterable[str]) -> AttributeError | ImportError:
    """Return the error that a module's `__getattr__` raises for a name.

    It is an ImportError for `from ... import`, which would drop the text of an AttributeError, and
    an AttributeError otherwise.
    """
    reason = _REASONS.get(name) or f"there are {', '.join(sorted(served))}"
    message = f"`{module}` has no `{name}`: {reason}"
    if _is_imported():
        return ImportError(message, name=module)
    return AttributeError(message, name=name)


def _is_imported() -> bool:
    """Return whether `from ... import` reads the name, instead of `.` or getattr."""
    asking = sys._getframe(3)  # noqa: SLF001 - the frame that reads the name
    return asking.f_code.co_code[asking.f_lasti] == dis.opmap["IMPORT_FROM"]
