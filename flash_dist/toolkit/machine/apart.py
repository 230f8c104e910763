"""Asks the driver for its GPUs, in a separate process if this process does not use CUDA yet.

`cuInit` cannot be undone: a process that has called it leaves its forked children (a DataLoader's
workers, multiprocessing on Linux) without CUDA. NVML cannot replace `cuInit`: NVML ignores CUDA's
device order and environment variables.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from ..builds.package import PACKAGE
from ..targets.devices import Device, Driver
from .libcuda import LIBRARY, Cuda, Gpu, read_cuda

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT: Final = 120.0  # seconds; without persistence mode the driver first initialises each GPU

# Prefixes of variables that change what CUDA finds: those of CUDA, containers and the loader.
_PREFIXES = ("CUDA_", "NVIDIA_", "LD_")
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED

# Code that the child runs. Its sys.path has the package's parent folder and the standard library.
_CHILD = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); "
    "runpy.run_module(sys.argv[2], run_name='__main__')"
)

_answers: Final[dict[tuple[tuple[str, str], ...], Cuda]] = {}


def read_cuda_apart() -> Cuda:
    """Return the result of `read_cuda`, without initialising CUDA in this process.

    A result that is not `broken` is cached. If this process already uses CUDA, or if Python is
    embedded in another program, `read_cuda` runs in this process.
    """
    if uses_cuda():
        return read_cuda()
    # The variables that an answer depends on.
    key = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_PREFIXES)))
    if key not in _answers:
        answer = _ask_child()
        if answer.status == "broken":  # not cached: may be fixed while this process runs
            return answer
        _answers[key] = answer
    return _answers[key]


def uses_cuda() -> bool:
    """Tell if CUDA is initialised in this process, by any code. The test changes nothing."""
    try:
        library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD)
        code = library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):  # not loaded, or a system other than Linux
        return False
    return bool(code != _NOT_INITIALIZED)


def _ask_child() -> Cuda:
    if not sys.executable:  # Python embedded in another program
        return read_cuda()
    module = ".".join((PACKAGE.name, *__name__.split(".")[-3:]))
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(PACKAGE.parent), module]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return Cuda("broken", reason=f"libcuda.so.1 did not answer within {TIMEOUT:g} s")
    except OSError as error:
        return Cuda("broken", reason=f"no process could be started to ask libcuda.so.1: {error}")
    if done.returncode == 0:
        return _parse(json.loads(done.stdout))
    told = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return Cuda("broken", reason=f"the process that asked libcuda.so.1 failed: {told[0]}")


def _render(cuda: Cuda) -> dict[str, Any]:
    """Return the plain data that `_parse` reads."""
    driver = cuda.driver
    return {
        "status": cuda.status,
        "reason": cuda.reason,
        "driver": [driver.cuda, driver.release] if driver else None,
        "gpus": [{**vars(gpu), "device": str(gpu.device)} for gpu in cuda.gpus],
    }


def _parse(data: Mapping[str, Any]) -> Cuda:
    driver = None
    if data["driver"]:
        (major, minor), release = data["driver"]
        driver = Driver((major, minor), release)
    gpus = tuple(Gpu(**{**one, "device": Device.parse(one["device"])}) for one in data["gpus"])
    return Cuda(data["status"], driver, gpus, data["reason"])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_render(read_cuda())))
