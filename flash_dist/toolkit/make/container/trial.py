"""Try a wheel in the container, where glibc is old: cibuildwheel's test step.

Under each torch that the variable TESTED names, it runs a program that needs no GPU, and asks
doctor about GPUs that are not here: those the wheel was built for, and one that it is not for.
Standard library only, and of the source tree the program, the package's name and the hashes of what
torch needs.

    python trial.py PROGRAM         tries the wheel
    python trial.py --prepare       installs the first torch
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3]
NAME = json.loads((PACKAGE / "product.json").read_text(encoding="utf-8"))["name"]
TESTED = f"{NAME.upper()}_TEST_TORCH"
TARGETS = f"""
import json
from {NAME}.toolkit.builds.manifest import load_manifest
print(json.dumps([[a.number, a.ptx] for a in load_manifest().arch_set.archs]))
"""
BESIDE = str(Path(__file__).resolve().parents[1] / "locks" / "beside_torch.txt")
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
    command = [sys.executable, "-m", NAME, "doctor", "--gpu", capability]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != int(not served):
        sys.exit(
            f"doctor --gpu {capability} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    print(f"doctor --gpu {capability}: {'served' if served else 'not served, as it should be'}")


def main() -> None:
    """Command line."""
    versions = os.environ.get(TESTED, "").split()
    if not versions:
        sys.exit(f"{TESTED} names no torch, such as `2.10 2.15`")
    (argument,) = sys.argv[1:]
    if argument == "--prepare":
        install(versions[0])
        return
    program = Path(argument).read_text(encoding="utf-8")
    for version in versions:
        install(version)
        print(ask(program).strip(), flush=True)
        for capability, served in expected().items():
            ask_doctor(capability, served=served)


if __name__ == "__main__":
    main()
