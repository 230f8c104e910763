"""Tests a wheel in the container, where glibc is old: cibuildwheel's test step.

The test runs with each release of torch that a variable names. It loads the operators. For each
target of the wheel, doctor must accept a GPU of that compute capability, which need not be in the
machine. If no target is 7.5, doctor must reject a GPU with 7.5. Then the project's tests run:
pytest for a folder, Python for a file.

The script uses only the standard library, because the toolkit that builds wheels is not installed
next to the tested wheel. The script reads two parts of the sources: the tests, and the hashes of
the packages that torch needs.

    python smoke_test.py PACKAGE --prepare              installs the first torch
    python smoke_test.py PACKAGE TOOLKIT [TEST ...]     tests the wheel; TOOLKIT is a module of it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PREPARE = "--prepare"
TARGETS = """
import json
from {toolkit}.builds.manifest import load_manifest
print(json.dumps([[a.number, a.ptx] for a in load_manifest().arch_set.archs]))
"""
OPERATORS = """
import sys
from {toolkit}.loading.child import load_extension
load_extension()
import torch
print("torch", torch.__version__ + ", Python", sys.version.split()[0] + ": the operators load")
"""
BESIDE = str(Path(__file__).resolve().parents[1] / "locks" / "beside_torch.txt")
FIRST = 75  # compute capability 7.5, the lowest that CUDA 13 supports


def name_variable(package: str) -> str:
    """Return the name of the variable that lists releases of torch."""
    return f"{package.upper()}_TEST_TORCH"


def install(version: str) -> None:
    """Install a release of torch, such as 2.10.1, or the newest 2.10.x for 2.10."""
    pattern = f"torch=={version}" if version.count(".") > 1 else f"torch=={version}.*"
    install = ["uv", "pip", "install", "--quiet"]
    subprocess.run([*install, "--require-hashes", "--requirement", BESIDE], check=True)
    subprocess.run([*install, pattern], check=True)


def ask(code: str) -> str:
    """Run code in a new Python process, and return its output."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def expected(toolkit: str) -> dict[str, bool]:
    """Map compute capabilities to True if doctor must find code for them, else to False."""
    targets = json.loads(ask(TARGETS.format(toolkit=toolkit)))
    served = {f"{number // 10}.{number % 10}": True for number, _ in targets}
    oldest = min(number for number, _ in targets)
    return served if oldest == FIRST else {**served, "7.5": False}


def ask_doctor(toolkit: str, capability: str, *, served: bool) -> None:
    """Check doctor's answer for a GPU that is not here."""
    code = f"from {toolkit}.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "doctor", "--gpu", capability]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != int(not served):
        sys.exit(
            f"doctor --gpu {capability} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    said = "served" if served else "not served, as it should be"
    print(f"doctor --gpu {capability}: {said}", flush=True)


def judge(toolkit: str) -> None:
    """Load the operators, and ask doctor about every target."""
    print(ask(OPERATORS.format(toolkit=toolkit)).strip(), flush=True)
    for capability, served in expected(toolkit).items():
        ask_doctor(toolkit, capability, served=served)


def run_test(path: Path) -> None:
    """Run pytest on a folder; run a file's text as a program, which cannot import the sources."""
    if path.is_dir():
        words = ["-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", str(path)]
    else:
        words = ["-c", path.read_text(encoding="utf-8")]
    status = subprocess.run([sys.executable, *words], check=False).returncode
    if status:
        sys.exit(f"`{path.name}` ended with {status}")


def main() -> None:
    """Run the command."""
    package, toolkit, *tests = sys.argv[1:]
    variable = name_variable(package)
    versions = os.environ.get(variable, "").split()
    if not versions:
        sys.exit(f"{variable} names no torch, such as `2.10 2.15`")
    if toolkit == PREPARE:
        install(versions[0])
        return
    for version in versions:
        install(version)
        judge(toolkit)
        for test in tests:
            run_test(Path(test))


if __name__ == "__main__":
    main()
