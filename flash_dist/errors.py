"""Errors that this package raises on purpose: its public ones, and those of the toolkit.

The toolkit serves any package, so its base class has a general name. This module gives that class
its public name, which tracebacks and pickles show.
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
