"""Registers operators with a torch module when that module is imported, not before."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def when_imported(name: str, register: Callable[[], None]) -> None:
    """Call a function now if a module is already imported, else right after its import."""
    if name in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Late(name, register))


class _Late(MetaPathFinder):
    """Import finder for one module: lets the other finders load it, then calls a function."""

    def __init__(self, name: str, register: Callable[[], None]) -> None:
        self.name = name
        self.register = register

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, whose loader also calls `register`; None for other modules."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
