"""Text for the build log: sizes, and how much a build reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ci.project import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.audit import AuditResult


def report_path(label: str) -> Path:
    """Where setup.py leaves its `N objects compiled, M reused` for this label."""
    return ROOT / "build" / "reports" / f"{label}.txt"


def size_table(audit: AuditResult) -> str:
    """Bytes per target and per kernel family, and the whole against its budget."""
    lines = [f"{'target':<14}{'kernels':>8}{'images':>8}{'bytes':>12}"]
    for target, (images, kernels, packed) in audit.target_sizes().items():
        lines.append(f"{target:<14}{kernels:>8}{images:>8}{packed:>12,}")
    budget = f" of {audit.budget_bytes:,}" if audit.budget_bytes else ""
    lines.append(f"{'wheel':<30}{audit.wheel_bytes:>12,}{budget}")
    return "\n".join(lines)
