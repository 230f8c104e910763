"""The errors that this package raises on purpose: public, and those of the toolkit.

The toolkit serves any package, and its base class has no name of one. Here that class itself gets
the public name, which tracebacks and pickles have from then on.
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
