"""What each kernel of a build runs on a GPU, in words: code, plan, and whether it is proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..targets.verdict import name_size

if TYPE_CHECKING:
    from ..targets.verdict import DeviceVerdict, KernelVerdict

_FIRST_PROOF = "its selftest here is the first proof on real hardware"


def describe_plans(verdict: DeviceVerdict) -> tuple[str, ...]:
    """Write one line per role; dtypes that fare alike share it."""
    lines: dict[tuple[str, str], list[str]] = {}
    for (role, dtype), kernels in _by_role_and_dtype(verdict).items():
        text = "; ".join(_describe_head_dims(kernels))
        lines.setdefault((role, text), []).append(dtype)
    return tuple(
        f"{role:<16} {' '.join(dtypes):<21}  {text}" for (role, text), dtypes in lines.items()
    )


def describe_lacking(verdict: DeviceVerdict) -> tuple[str, ...]:
    """Say which dtypes the hardware cannot compute with."""
    lacking = {
        kernel.key[1]: kernel.reason
        for kernel in verdict.kernels
        if kernel.how == "not-on-this-hardware"
    }
    return tuple(f"not on this hardware: {reason}" for reason in lacking.values())


def _by_role_and_dtype(verdict: DeviceVerdict) -> dict[tuple[str, str], list[KernelVerdict]]:
    """Group the kernels that the hardware could run, forward first, fp16, bf16, others."""
    groups: dict[tuple[str, str], list[KernelVerdict]] = {}
    order = {"fp16": 0, "bf16": 1}
    able = [kernel for kernel in verdict.kernels if kernel.how != "not-on-this-hardware"]
    for kernel in sorted(able, key=lambda k: (k.key[0] != "fwd", k.key[0], order.get(k.key[1], 2))):
        groups.setdefault(kernel.key[:2], []).append(kernel)
    return groups


def _describe_head_dims(kernels: list[KernelVerdict]) -> list[str]:
    """Group the head_dims that run the same way."""
    groups: dict[str, list[str]] = {}
    for kernel in kernels:
        groups.setdefault(_describe_kernel(kernel), []).append(name_size(*kernel.key[2:]))
    if len(groups) == 1:
        return list(groups)
    return [f"head_dim {', '.join(dims)}: {text}" for text, dims in groups.items()]


def _describe_kernel(kernel: KernelVerdict) -> str:
    if kernel.variant is None:
        return f"none ({kernel.reason})"
    plan = f", {kernel.variant.plan} KB plan" if kernel.variant.plan else ""
    return f"{kernel.variant.arch}{plan}"


def describe_proof(verdict: DeviceVerdict) -> tuple[str, ...]:
    """Say so where the code that will run was never run on real hardware by its builder."""
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
        lines.append(f"{target} {so_far} by its builder: {_FIRST_PROOF}")
    return tuple(lines)
