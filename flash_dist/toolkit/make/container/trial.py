"""Try a wheel in the container, where glibc is old: cibuildwheel's test step.

Under each torch that FLASH_DIST_TEST_TORCH names, it imports the package, calls the operator on the
CPU and asks doctor about GPUs that are not here: those the wheel was built for, and one that it is
not for. Standard library only, and of the source tree the hashes of what torch needs.

    python flash_dist/toolkit/make/container/trial.py --prepare     installs the first torch
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys, torch, flash_dist
from flash_dist.kernels import operators
q, k, v = (torch.randn(2, 33, 4, 64).half() for _ in range(3))
out = flash_dist.flash_attn_func(q, k, v, causal=True)
assert out.shape == q.shape and out.dtype == q.dtype and bool(out.isfinite().all())
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
try:  # the operator for GPUs refuses these tensors with a C++ exception
    mask, packing = [0, -1, 0, 1], operators.NOT_PACKED
    torch.ops.flash_dist.fwd.default.redispatch(cuda, q, k, v, None, mask, *packing, 0.25)
except RuntimeError as error:
    assert "dtype and device of q" in str(error), error
else:
    sys.exit("a failing check in the binding raised nothing")
print(f"torch {torch.__version__}, Python {sys.version.split()[0]}: imported, the CPU operator "
      "answers, an error inside the binding arrives as RuntimeError")
"""
TARGETS = """
import json
from flash_dist.toolkit.builds.manifest import load_manifest
print(json.dumps([[a.number, a.ptx] for a in load_manifest().arch_set.archs]))
"""
BESIDE = str(Path(__file__).resolve().parents[4] / "ci" / "locks" / "beside_torch.txt")
FIRST = 75  # the oldest GPU that CUDA 13 knows


def install(version: str) -> None:
    """Install one torch, 2.10 or 2.10.1; the wheel itself stays."""
    pattern = f"torch=={version}" if version.count(".") > 1 else f"torch=={version}.*"
    install = ["uv", "pip", "install", "--quiet"]
    subprocess.run([*install, "--require-hashes", "--requirement", BESIDE], check=True)
    subprocess.run([*install, pattern], check=True)


def ask(code: str) -> str:
    """Run Python where no source tree is in sight."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def expected() -> dict[str, bool]:
    """Return compute capabilities, and whether doctor must find code for them."""
    targets = json.loads(ask(TARGETS))
    served = {f"{number // 10}.{number % 10}": True for number, _ in targets}
    oldest = min(number for number, _ in targets)
    return served if oldest == FIRST else {**served, "7.5": False}


def ask_doctor(capability: str, *, served: bool) -> None:
    """Insist on doctor's answer for a GPU that is not here."""
    command = [sys.executable, "-m", "flash_dist", "doctor", "--gpu", capability]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != int(not served):
        sys.exit(
            f"doctor --gpu {capability} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    print(f"doctor --gpu {capability}: {'served' if served else 'not served, as it should be'}")


def main() -> None:
    """Command line."""
    versions = os.environ.get("FLASH_DIST_TEST_TORCH", "").split()
    if not versions:
        sys.exit("FLASH_DIST_TEST_TORCH names no torch, such as `2.10 2.15`")
    if "--prepare" in sys.argv:
        install(versions[0])
        return
    for version in versions:
        install(version)
        print(ask(CODE).strip(), flush=True)
        for capability, served in expected().items():
            ask_doctor(capability, served=served)


if __name__ == "__main__":
    main()
