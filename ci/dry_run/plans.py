"""Find the plans of all selftest cases for a described GPU, on any machine.

python -m ci.dry_run.plans --archs 9.0a [--capability 9.0 --sm-count 132 --smem-limit 232448]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ci.dry_run.build import DryRunError, build_package
from ci.places import SOURCES
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.selftest.fingerprints import Setting
from flash_dist.toolkit.selftest.report import CasePlan
from flash_dist.toolkit.targets.archs import ArchSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flash_dist.toolkit.targets.archs import Arch

H200: Final = Setting("9.0", 132, 232448)


class Recorded(NamedTuple):
    """The plans that the library recorded for one case, and the description of its inputs."""

    plans: list[dict[str, Any]]
    inputs: dict[str, Any]

    @property
    def plan(self) -> CasePlan:
        """The plan, as fingerprints store it."""
        return CasePlan.of(self.plans, self.inputs)


def find_plans(setting: Setting, archs: Sequence[Arch]) -> dict[str, CasePlan]:
    """Run each case in a temporary folder, and return the cases' plans by name."""
    with tempfile.TemporaryDirectory(prefix="flash_dist-") as name:
        recorded = run_dry(setting, archs, Path(name))
    return {case: one.plan for case, one in recorded.items()}


def run_dry(
    setting: Setting, archs: Sequence[Arch], folder: Path, csrc: Path = SOURCES
) -> dict[str, Recorded]:
    """Run each case, and return what was recorded for each, by name.

    Args:
        setting: The GPU.
        archs: The targets of the library.
        folder: The build folder, which the next run reuses.
        csrc: The sources.

    Raises:
        DryRunError: The sources do not compile, or a case does not run.
    """
    package = build_package(folder, archs, find_torch(), csrc)
    described = {
        "DRY_RUN_CAPABILITY": setting.compute_capability.replace(".", ""),
        "DRY_RUN_SM_COUNT": str(setting.sm_count),
        "DRY_RUN_SMEM_LIMIT": str(setting.smem_limit),
        "PYTHONPATH": str(package),
        "PYTHONSAFEPATH": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_DIST_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("child.py"))],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**kept, **described},
    )
    if done.returncode:
        message = f"a case fails in a dry run: {done.stderr[-2000:]}"
        raise DryRunError(message)
    events = map(json.loads, done.stdout.splitlines())
    return {one["case"]: Recorded(one["plans"], one["inputs"]) for one in events}


def find_torch() -> Path:
    """Return the folder of the installed torch.

    Raises:
        DryRunError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        message = "a dry run needs torch, got an environment without it"
        raise DryRunError(message, hint="`pip install torch`, also without CUDA")
    return Path(spec.origin).parent


@command
def main(args: Sequence[str] | None = None) -> int:
    """Print the plan of each case."""
    parser = argparse.ArgumentParser(prog="python -m ci.dry_run.plans", description=__doc__)
    parser.add_argument("--archs", required=True, help='targets of the library, e.g. "7.5;8.0+PTX"')
    parser.add_argument("--capability", default=H200.compute_capability)
    parser.add_argument("--sm-count", type=int, default=H200.sm_count)
    parser.add_argument("--smem-limit", type=int, default=H200.smem_limit, help="bytes of a block")
    given = parser.parse_args(args)
    setting = Setting(given.capability, given.sm_count, given.smem_limit)
    archs = ArchSet.parse(given.archs, name="--archs").archs
    with tempfile.TemporaryDirectory(prefix="flash_dist-") as name:
        for case, one in run_dry(setting, archs, Path(name)).items():
            told = {"case": case, "plan": one.plan.digest, "inputs": one.inputs, "calls": one.plans}
            print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
