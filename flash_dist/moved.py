"""Raises an error with the new place of a module that is imported from its old place."""

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
    """Finder for `sys.meta_path` that runs after all others and finds nothing."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Raise ModuleNotFoundError with the new place of a module of this package."""
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
