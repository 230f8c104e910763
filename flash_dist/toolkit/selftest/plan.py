"""The plan of a case: the library's decisions on its calls, which determine the bits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..loading.library import recorded_plans
from ..product import HAS_DISPATCHER
from .digests import hash_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .case import Case
    from .comparison import Tensors


@dataclass(frozen=True)
class CasePlan:
    """A hash of all decisions on one case, and the kernels that it launched."""

    digest: str = ""  # empty: no library decided, as on the CPU
    kernels: tuple[str, ...] = ()  # symbols in ascending order

    @classmethod
    def of(cls, plans: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]) -> CasePlan:
        """Hash the library's records, and the case's description of its inputs."""
        text = json.dumps([plans, inputs], sort_keys=True)
        kernels = {str(one["kernel"]) for one in plans if "kernel" in one}
        return cls(hash_bytes(text.encode()), tuple(sorted(kernels)))

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as in the child process's report."""
        return {"plan": self.digest, "kernels": list(self.kernels)}


def run_recorded(case: Case, inputs: Any) -> tuple[Tensors, CasePlan]:  # noqa: ANN401
    """Run a case once, and return its results and its plan.

    Without a dispatcher nothing is recorded: the plan is the case's own description.
    """
    if not HAS_DISPATCHER:
        return case.run(inputs), CasePlan.of((), case.describe_inputs(inputs))
    with recorded_plans() as plans:
        results = case.run(inputs)
    return results, CasePlan.of(plans, case.describe_inputs(inputs))
