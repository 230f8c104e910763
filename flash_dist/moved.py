"""Raises an error with the new name of a moved module that is imported by its old name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOOLKIT: Final = (
    "audit",
    "binaries",
    "builds",
    "checks",
    "cli",
    "doctor",
    "findings",
    "gpucode",
    "indexes",
    "loading",
    "machine",
    "report_page",
    "selftest",
    "targets",
)
PLACES: Final = {name: f"toolkit.{name}" for name in _TOOLKIT} | {
    "_version": "toolkit.version",
    "kernels.library": "toolkit.loading.library",
}


class MovedModules:
    """Finder at the end of `sys.meta_path`: finds no module, but raises for moved ones."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Raise ModuleNotFoundError with the new name if this package has moved the module."""
        del path, target
        package, _, rest = name.partition(".")
        place = PLACES.get(rest) if package == __package__ else None
        if place is not None:
            _refuse(name, f"{package}.{place}")


def _refuse(name: str, place: str) -> NoReturn:
    message = (
        f"the module `{name}` has moved to `{place}`\n\nhint: import names of `flash_dist` itself, "
        "of `flash_dist.masks` and of `flash_dist.errors`; other modules may move in any version"
    )
    raise ModuleNotFoundError(message, name=name)
