"""The toolkit's selftest cases for attention, which call attention as users do."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from ..toolkit.selftest.case import Case as ToolkitCase
from ..toolkit.selftest.case import Exact
from ..toolkit.targets.axes import smallest_size
from .cases import Case, Kernels, make_cases
from .inputs import Inputs, load_attention
from .masks import DTYPES
from .reference import OF_SINKS, allowed_error, error_of_rounded_out

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ..toolkit.selftest.case import ChooseCases
    from ..toolkit.selftest.comparison import Tensors
    from .inputs import Attention

CPU_KERNELS: Final[tuple[Kernels, ...]] = (
    Kernels("fp16", 64, 64),
    Kernels("bf16", 128, 128),
    Kernels("fp32", 64, 64),
)

_LATENT: Final = "mla"  # prefix of roles for latent keys
_TESTED: Final = ("fwd", "mla")  # roles with test cases for each size


@dataclass(frozen=True)
class AttentionCase(ToolkitCase):
    """A case and the implementation under test; see `toolkit.selftest.case.Case`."""

    case: Case
    attention: Attention

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.case.name

    @property
    def fills_gpu(self) -> bool:
        """True for large cases, whose float64 reference takes long."""
        return self.case.fills_gpu

    def make_inputs(self, device: torch.device) -> Inputs:
        """Return the tensors of the case."""
        return Inputs.make(self.case, device)

    def describe_inputs(self, inputs: Inputs) -> dict[str, Any]:
        """Return {"mask": digest of the arrays that kernels read}; empty if there are none."""
        return inputs.describe_mask(self.case)

    def run(self, inputs: Inputs) -> Tensors:
        """Run forward and backward once; for a cache or max_logit only the forward."""
        return inputs.attend(self.attention, self.case)

    def compute_exact(self) -> Exact:
        """Return the float64 results, and the allowed error of each."""
        inputs = self.make_inputs(torch.device("cpu"))
        values = inputs.attend_exactly(self.case, torch.float64)
        baseline = inputs.attend_exactly(self.case, DTYPES[self.case.dtype])
        allowed = {name: allowed_error(name, values[name], baseline[name]) for name in values}
        if OF_SINKS in values:
            allowed[OF_SINKS] += error_of_rounded_out(values["out"], inputs.dout)
        return Exact(values, allowed)


def load_cases() -> ChooseCases:
    """Load attention, and return a function that chooses the cases of a device.

    Raises:
        ExtensionError: The compiled extension does not load.
    """
    return partial(choose_cases, load_attention())


def choose_cases(
    attention: Attention, device: torch.device, selected: Sequence[dict[str, Any]]
) -> tuple[AttentionCase, ...]:
    """Return the cases of a device: for each size with kernels, or on the CPU for CPU_KERNELS."""
    kernels, sm_count = CPU_KERNELS, 0
    if device.type == "cuda":
        kernels = find_kernels(selected)
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    return tuple(AttentionCase(case, attention) for case in make_cases(kernels, sm_count))


def _find_size(
    role: str, sizes: Collection[tuple[int, ...]], head_dims: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the smallest compiled size of a role for head_dims; None if there is none.

    For latent keys it must be head_dims itself.
    """
    if role.startswith(_LATENT):
        return head_dims if head_dims in sizes else None
    return smallest_size(sizes, head_dims)


def find_kernels(selected: Iterable[dict[str, Any]]) -> tuple[Kernels, ...]:
    """Return the forward and latent sizes for which the kernel of every role that has one loads."""
    loads: defaultdict[tuple[str, str], dict[tuple[int, ...], bool]] = defaultdict(dict)
    for kernel in selected:
        size = int(kernel["head_dim"]), int(kernel["head_dim_v"])
        loads[str(kernel["role"]), str(kernel["dtype"])][size] = kernel["chosen"] is not None

    def is_usable(dtype: str, head_dims: tuple[int, ...]) -> bool:
        sizes = (
            (built, _find_size(role, built, head_dims))
            for (role, its_dtype), built in loads.items()
            if its_dtype == dtype
        )
        return all(built[size] for built, size in sizes if size is not None)

    tested = (
        Kernels(dtype, *head_dims)
        for (role, dtype), built in loads.items()
        if role in _TESTED
        for head_dims in built
        if is_usable(dtype, head_dims)
    )
    return tuple(sorted(tested))
