"""Clock and power through NVML's real C interface: a small library, compiled for the test."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.machine.nvml import Gauge, Reading

if TYPE_CHECKING:
    from pathlib import Path

# Names and structures as in nvml.h; INSTANT, USAGE and CLOCK are return codes.
SOURCE = r"""
#include <cstring>
typedef int* nvmlDevice_t;
typedef struct {
  unsigned int fieldId, scopeId;
  long long timestamp, latencyUsec;
  int valueType, nvmlReturn;
  union { double d; unsigned int u; unsigned long l; unsigned long long ull; long long ll; } value;
} nvmlFieldValue_t;
static int gpu;
extern "C" {
int nvmlInit_v2() { return INIT; }
int nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  *device = &gpu;
  return std::strcmp(uuid, "GPU-1") ? 6 : 0;
}
int nvmlDeviceGetClockInfo(nvmlDevice_t device, int kind, unsigned int* clock) {
  if (device != &gpu) return 2;
  *clock = kind == 1 ? 1605 : 0;
  return CLOCK;
}
#ifndef OLD
int nvmlDeviceGetFieldValues(nvmlDevice_t, int count, nvmlFieldValue_t* values) {
  if (count != 1 || values->fieldId != 186 || values->scopeId != 0) return 2;
  values->nvmlReturn = INSTANT;
  values->value.u = 698500;
  return 0;
}
#endif
int nvmlDeviceGetPowerUsage(nvmlDevice_t, unsigned int* milliwatts) {
  *milliwatts = 512000;
  return USAGE;
}
}
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ makes the library")


def build(folder: Path, *flags: str) -> str:
    """Compile the library."""
    defaults = {"INIT": "0", "INSTANT": "0", "USAGE": "0", "CLOCK": "0"}
    given = dict(flag.partition("=")[::2] for flag in flags)
    defines = [f"-D{name}={value or 1}" for name, value in (defaults | given).items()]
    path, code = folder / "libnvidia-ml.so.1", folder / "nvml.cpp"
    code.write_text(SOURCE, encoding="utf-8")
    command = ["g++", "-shared", "-fPIC", "-w", *defines, "-o", str(path), str(code)]
    subprocess.run(command, check=True)
    return str(path)


@pytest.mark.parametrize(
    ("flags", "reading"),
    [
        ((), Reading(1605, 698.5)),
        (("INSTANT=3",), Reading(1605, 512.0)),
        (("OLD",), Reading(1605, 512.0)),
        (("OLD", "USAGE=3"), Reading(1605, None)),
        (("CLOCK=3",), Reading(None, 698.5)),
        (("INIT=9",), Reading()),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_only_the_values_that_nvml_has_are_read(
    tmp_path: Path, flags: tuple[str, ...], reading: Reading
) -> None:
    assert Gauge("GPU-1", build(tmp_path, *flags)).read() == reading


def test_a_gpu_that_nvml_does_not_know_tells_nothing(tmp_path: Path) -> None:
    assert Gauge("GPU-2", build(tmp_path)).read() == Reading()


def test_without_a_library_nothing_is_reported(tmp_path: Path) -> None:
    assert Gauge("GPU-1", str(tmp_path / "none.so")).read() == Reading()
