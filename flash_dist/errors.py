"""The errors that this package raises on purpose: public, and those of the toolkit."""

from .toolkit.errors import (
    AccessError,
    ArchError,
    AuditError,
    ExtensionError,
    FatbinError,
    FetchError,
    FlashDistError,
    GroupError,
    LimitError,
    ManifestError,
    UsageError,
)

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
