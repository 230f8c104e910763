"""Integrations with other libraries: each takes one or two lines of code."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["diffusers", "sglang", "torch_sdpa", "transformers", "vllm"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f".{name}", __name__)
    message = f"module `{__name__}` has no attribute `{name}`"
    raise AttributeError(message)
