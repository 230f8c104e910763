"""Describes what each kernel of a build runs on a GPU: code, plan, and whether it is proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..product import PRODUCT
from ..targets.axes import name_sizes

if TYPE_CHECKING:
    from ..targets.axes import Axes
    from ..targets.verdict import DeviceVerdict, KernelVerdict

_FIRST_PROOF = "its selftest here is the first proof on real hardware"


def describe_plans(verdict: DeviceVerdict) -> tuple[str, ...]:
    """Write one line per role; equal dtypes share it."""
    lines: dict[tuple[str, str], list[str]] = {}
    for (role, words), kernels in _by_role_and_words(verdict).items():
        text = "; ".join(_describe_sizes(kernels, verdict.axes))
        lines.setdefault((role, text), []).append(" ".join(words))
    return tuple(
        f"{role:<16} {' '.join(words):<21}  {text}" for (role, text), words in lines.items()
    )


def describe_lacking(verdict: DeviceVerdict) -> tuple[str, ...]:
    """Say which dtypes the hardware cannot compute with."""
    lacking = {
        kernel.key.words: kernel.reason
        for kernel in verdict.kernels
        if kernel.how == "not-on-this-hardware"
    }
    return tuple(f"not on this hardware: {reason}" for reason in lacking.values())


def _by_role_and_words(
    verdict: DeviceVerdict,
) -> dict[tuple[str, tuple[str, ...]], list[KernelVerdict]]:
    """Group the kernels that the hardware could run, by role and dtype."""
    groups: dict[tuple[str, tuple[str, ...]], list[KernelVerdict]] = {}
    able = [kernel for kernel in verdict.kernels if kernel.how != "not-on-this-hardware"]
    for kernel in sorted(able, key=lambda kernel: verdict.axes.rank(kernel.key)):
        groups.setdefault(kernel.key[:2], []).append(kernel)
    return groups


def _describe_sizes(kernels: list[KernelVerdict], axes: Axes) -> list[str]:
    """Group the sizes that run in the same way."""
    groups: dict[str, list[str]] = {}
    for kernel in kernels:
        groups.setdefault(_describe_kernel(kernel), []).append(name_sizes(kernel.key.sizes))
    if len(groups) == 1:
        return list(groups)
    name = axes.sizes[0] if axes.sizes else ""
    return [f"{name} {', '.join(sizes)}: {text}" for text, sizes in groups.items()]


def _describe_kernel(kernel: KernelVerdict) -> str:
    if kernel.variant is None:
        return f"none ({kernel.reason})"
    plan = f", {kernel.variant.plan} KB plan" if kernel.variant.plan else ""
    return f"{kernel.variant.arch}{plan}"


def describe_proof(verdict: DeviceVerdict) -> tuple[str, ...]:
    """Warn if the builder never ran this code on real hardware."""
    unproven: dict[str, str] = {}
    for kernel in verdict.kernels:
        variant = kernel.variant
        if variant and (
            variant.proof == "assembled" or (variant.proof == "jit" and kernel.how != "jit")
        ):
            unproven[str(variant.arch)] = variant.proof
    lines = []
    for target, proof in unproven.items():
        so_far = "was only assembled" if proof == "assembled" else "ran only as PTX on newer GPUs"
        first = f": {_FIRST_PROOF}" if PRODUCT.cases else ""
        lines.append(f"{target} {so_far} by its builder{first}")
    return tuple(lines)
