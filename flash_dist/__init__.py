"""Multi-arch CUDA attention kernels and the tools that build, inspect and prove their wheels.

Importing this needs neither torch nor a GPU: names are loaded on first use, so that
`python -m flash_dist doctor` starts on a broken install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._native import last_variant
    from .attention import flash_attn_func

    __version__: str

__all__ = ["__version__", "flash_attn_func", "last_variant"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from ._version import read_version  # noqa: PLC0415

        return read_version()
    if name == "flash_attn_func":
        from .attention import flash_attn_func  # noqa: PLC0415

        return flash_attn_func
    if name == "last_variant":
        from ._native import last_variant  # noqa: PLC0415

        return last_variant
    message = f"module `flash_dist` has no attribute `{name}`"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(__all__)
