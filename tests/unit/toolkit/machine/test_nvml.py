"""NVML through its real C interface: a small library with the functions, compiled for the test."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.machine.nvml import MigInstance, normalize_pci, read_nvml
from flash_dist.toolkit.targets.devices import Device

if TYPE_CHECKING:
    from pathlib import Path

# Names and structures as in nvml.h. GPU 0 is an A100 in MIG mode with a gap between its two
# instances; GPU 1 has no MIG. INIT, COUNT and SECOND are return codes.
SOURCE = r"""
#include <cstdio>
#include <cstring>
typedef struct { int gpu; int instance; } *nvmlDevice_t;
typedef struct {
  char busIdLegacy[16];
  unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} nvmlPciInfo_t;
enum { OK = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6 };
static struct { int gpu; int instance; } all[] = {{0, -1}, {1, -1}, {0, 0}, {0, 2}};
static int alive = 0;
static int print(char* to, unsigned int size, const char* text) {
  if (std::strlen(text) + 1 > size) return 7;
  std::strcpy(to, text);
  return OK;
}
extern "C" {
int nvmlInit_v2() { alive = INIT == OK; return INIT; }
int nvmlShutdown() { alive = 0; return OK; }
const char* nvmlErrorString(int code) { return code == 999 ? "Unknown Error" : "Other"; }
int nvmlDeviceGetCount_v2(unsigned int* count) { *count = 2; return alive ? COUNT : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t* device) {
  *device = (nvmlDevice_t)&all[index];
  return index == 1 ? SECOND : OK;
}
#ifndef OLD
int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int* current, unsigned int* pending) {
  if (device->gpu == 1) return NOT_SUPPORTED;
  *current = *pending = 1;
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t, unsigned int* count) { *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t, unsigned int index, nvmlDevice_t* mig) {
  if (index != 0 && index != 2) return NOT_FOUND;
  *mig = (nvmlDevice_t)&all[index == 0 ? 2 : 3];
  return OK;
}
#endif
int nvmlDeviceGetName(nvmlDevice_t device, char* name, unsigned int size) {
  if (device->instance >= 0) return print(name, size, "NVIDIA A100 MIG 1g.5gb");
  return print(name, size, device->gpu == 0 ? "NVIDIA A100" : "NVIDIA GeForce RTX 3090");
}
int nvmlDeviceGetUUID(nvmlDevice_t device, char* uuid, unsigned int size) {
  char text[40];
  const char* kind = device->instance < 0 ? "GPU" : "MIG";
  std::snprintf(text, sizeof text, "%s-%d%d", kind, device->gpu, device->instance);
  return print(uuid, size, text);
}
int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* info) {
  std::memset(info, 0, sizeof *info);
  std::strcpy(info->busIdLegacy, "wrong");
  std::strcpy(info->busId, device->gpu == 0 ? "00000000:3B:00.0" : "00000000:AF:00.0");
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int* major, int* minor) {
  *major = 8;
  *minor = device->gpu == 0 ? 0 : 6;
  return OK;
}
}
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ makes the library")


def build(folder: Path, *flags: str, source: str = SOURCE) -> str:
    """Compile the library."""
    defaults = {"INIT": "0", "COUNT": "0", "SECOND": "0"}
    given = dict(flag.partition("=")[::2] for flag in flags)
    defines = [f"-D{name}={value or 1}" for name, value in (defaults | given).items()]
    path, code = folder / "libnvidia-ml.so.1", folder / "nvml.cpp"
    code.write_text(source, encoding="utf-8")
    command = ["g++", "-shared", "-fPIC", "-w", *defines, "-o", str(path), str(code)]
    subprocess.run(command, check=True)
    return str(path)


def test_gpus_and_their_mig_instances_are_read(tmp_path: Path) -> None:
    nvml = read_nvml(build(tmp_path))
    assert (nvml.status, nvml.reason) == ("ok", "")
    first, second = nvml.gpus
    assert (first.index, first.name, first.uuid) == (0, "NVIDIA A100", "GPU-0-1")
    assert (first.pci, first.place) == ("00000000:3B:00.0", "0:3b:0")
    assert first.device == Device(8, 0)
    assert first.mig
    assert first.instances == (
        MigInstance("NVIDIA A100 MIG 1g.5gb", "MIG-00"),
        MigInstance("NVIDIA A100 MIG 1g.5gb", "MIG-02"),
    )
    assert (second.name, second.device) == ("NVIDIA GeForce RTX 3090", Device(8, 6))
    assert (second.mig, second.instances) == (False, ())
    assert nvml.to_json()["gpus"][1]["compute_capability"] == "8.6"


def test_a_gpu_that_is_not_for_this_process_is_left_out(tmp_path: Path) -> None:
    nvml = read_nvml(build(tmp_path, "SECOND=4"))
    assert nvml.status == "ok"
    assert [gpu.index for gpu in nvml.gpus] == [0]


def test_a_library_older_than_mig_is_no_failure(tmp_path: Path) -> None:
    nvml = read_nvml(build(tmp_path, "OLD"))
    assert [gpu.mig for gpu in nvml.gpus] == [False, False]


@pytest.mark.parametrize(
    ("flag", "code", "words"),
    [
        ("INIT=18", 18, "the kernel module is of another version than the library (18)"),
        ("INIT=9", 9, "the kernel module is not loaded (9)"),
        ("INIT=999", 999, "nvmlInit_v2 failed: Unknown Error (999)"),
        ("COUNT=4", 4, "nvmlDeviceGetCount_v2 failed: no permission (4)"),
    ],
)
def test_a_call_that_fails_is_the_reason(tmp_path: Path, flag: str, code: int, words: str) -> None:
    nvml = read_nvml(build(tmp_path, flag))
    assert (nvml.status, nvml.code, nvml.gpus) == ("broken", code, ())
    assert words in nvml.reason


def test_a_library_without_the_functions_is_broken(tmp_path: Path) -> None:
    nvml = read_nvml(build(tmp_path, source="int other;"))
    assert nvml.status == "broken"
    assert "lacks a function" in nvml.reason


def test_no_library_and_no_library_at_all(tmp_path: Path) -> None:
    assert read_nvml(str(tmp_path / "none.so")).status == "absent"
    wrong = tmp_path / "text.so"
    wrong.write_text("hello")
    nvml = read_nvml(str(wrong))
    assert nvml.status == "broken"
    assert "does not load" in nvml.reason


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0", True),
        ("00000001:00:00.0", "0001:00:00.0", True),
        ("00000000:3B:00.0", "0000:3c:00.0", False),
        ("", "", True),
    ],
)
def test_places_on_the_bus_are_compared_by_number(one: str, other: str, same: bool) -> None:  # noqa: FBT001
    assert (normalize_pci(one) == normalize_pci(other)) == same
