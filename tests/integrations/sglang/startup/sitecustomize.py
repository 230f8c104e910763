"""Let SGLang's processes import a stub of torchvision: PyPI has torchvision only for CUDA torch."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock


class Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - as the base class has it
    __version__ = "0"

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        is_found = name.partition(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if is_found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
