"""Looks up names in other libraries; raises a clear error if a name is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import FlashDistError


def find_names(user: str, module: str, *names: str, oldest: str) -> list[Any]:
    """Return objects from a module of another package, by name.

    Args:
        user: The name of our module that needs the objects, for the message.
        module: The full name of the other package's module.
        names: Names of the objects.
        oldest: The first version of the other package that has all names.

    Raises:
        FlashDistError: The package is not installed, or is too old.
    """
    peer = module.partition(".")[0]
    hint = f'`pip install "{peer}>={oldest}"`'
    try:
        package = import_module(peer)
    except ImportError as error:
        message = f"`{user}` needs {peer}, which does not import: {error}"
        raise FlashDistError(message, hint=hint) from error
    try:
        place = import_module(module)
        return [getattr(place, name) for name in names]
    except (AttributeError, ImportError) as error:
        version = getattr(package, "__version__", "an unknown version")
        message = f"{peer} must be at least {oldest}, got {version}"
        raise FlashDistError(message, hint=hint) from error
