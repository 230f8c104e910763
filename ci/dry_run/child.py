"""Run all selftest cases with the GPU operators on CPU tensors; print a line of JSON for each.

The process imports the package that build.py made; DRY_RUN_* variables describe the GPU.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any, Final

import torch

from flash_dist.kernels import cache  # noqa: F401 - registers its operators
from flash_dist.masks import registry
from flash_dist.proof import inputs
from flash_dist.proof.cases import make_cases
from flash_dist.proof.selftest import AttentionCase, find_kernels
from flash_dist.toolkit.loading.library import recorded_plans, select

_C: Final[Any] = torch._C  # noqa: SLF001 - the dispatcher
Tensor = torch.Tensor
DEVICE: Final = -1  # index of the CPU, for torch and for the library of a dry run


def use_kernels_of_gpus() -> Any:  # noqa: ANN401
    """Register our GPU operators for CPU tensors; the caller must keep the result alive."""
    library = torch.library.Library("flash_dist", "IMPL")
    for full_name in _C._dispatch_get_all_op_names():  # noqa: SLF001
        package, _, name = full_name.partition("::")
        on_gpu = _C._dispatch_has_kernel_for_dispatch_key(full_name, "CUDA")  # noqa: SLF001
        if package == "flash_dist" and on_gpu:
            operator = getattr(torch.ops.flash_dist, name).default
            call = partial(operator._op_dk, _C.DispatchKey.CUDA)  # noqa: SLF001
            library.impl(name, call, "CPU", allow_override=True)
    return library


def hold_nothing(*_: object) -> None:
    """Replace `DevicePlan.hold`, which keeps a mask's arrays alive for a CUDA stream."""


def make_no_values(_seed: int, shape: tuple[int, ...], dtype: torch.dtype, **_: object) -> Tensor:
    """Return uninitialised inputs, because nothing reads them."""
    return torch.empty(shape, dtype=dtype)


def main() -> None:
    """Print the plan of each case."""
    library = use_kernels_of_gpus()
    for where, name, value in (
        (registry.DevicePlan, "hold", hold_nothing),
        (inputs, "make_values", make_no_values),
    ):
        setattr(where, name, value)
    attention = inputs.load_attention()
    for case in make_cases(find_kernels(select(DEVICE)), int(os.environ["DRY_RUN_SM_COUNT"])):
        one = AttentionCase(case, attention)
        given = one.make_inputs(torch.device("cpu"))
        with recorded_plans() as plans:
            one.run(given)
        told = {"case": case.name, "plans": plans, "inputs": one.describe_inputs(given)}
        print(json.dumps(told), flush=True)
    del library


if __name__ == "__main__":
    main()
