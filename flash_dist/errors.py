"""Errors that this package raises on purpose, under their public names.

The toolkit, which serves any package, defines them, so their base class has a general name there.
This module gives the base class its public name, which tracebacks and pickles show.
"""

from .toolkit.errors import (
    AccessError,
    ArchError,
    AuditError,
    ExtensionError,
    FatbinError,
    FetchError,
    GroupError,
    LimitError,
    ManifestError,
    UsageError,
)
from .toolkit.errors import KernelsError as FlashDistError

__all__ = [
    "AccessError",
    "ArchError",
    "AuditError",
    "ExtensionError",
    "FatbinError",
    "FetchError",
    "FlashDistError",
    "GroupError",
    "LimitError",
    "ManifestError",
    "UsageError",
]

FlashDistError.__module__ = __name__
FlashDistError.__name__ = FlashDistError.__qualname__ = "FlashDistError"
