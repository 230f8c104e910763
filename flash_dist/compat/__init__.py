"""The functions of this package under other packages' names, for programs that use these names."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from ..errors import FlashDistError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["flash_attn", "flash_mla", "install", "vllm_flash_attn"]

_PACKAGE: Final = "flash_attn"
_INSTALLED: Final = ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface")


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f".{name}", __name__)
    message = f"module `{__name__}` has no attribute `{name}`"
    raise AttributeError(message)


def install() -> None:
    """Make `import flash_attn` import `flash_dist.compat.flash_attn` and its modules from now on.

    This affects the current process. Call it before anything imports flash_attn; an installed
    flash_attn is then ignored. Calling it again changes nothing.

    Raises:
        FlashDistError: Another flash_attn is imported already.
        ExtensionError: The compiled extension does not load.
    """
    ours = {name: import_module(f".{name}", __name__) for name in _INSTALLED}
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE and module is not ours.get(name):
            place = getattr(module, "__file__", None) or "memory"
            message = (
                f"no other flash_attn may be imported before `{__name__}.install()`, got `{name}` "
                f"from {place}"
            )
            raise FlashDistError(message, hint=f"call it before the first `import {_PACKAGE}`")
    sys.modules.update(ours)
