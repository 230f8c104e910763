"""A CUDA driver that records its use: a small libcuda.so.1 with the functions that we call.

Like the real one, it does not work in a forked child once the parent has called `cuInit`. The first
`cuInit` of a process appends the process id to the file that FAKE_DIARY names. CUDA_VISIBLE_DEVICES
is the number of GPUs.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc makes the library")

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
enum { OK = 0, NOT_INITIALIZED = 3, NO_DEVICE = 100 };
static int owner = 0;
static int gpus(void) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  return visible == NULL ? 2 : atoi(visible);
}
int cuDriverGetVersion(int* version) { *version = 13000; return OK; }
int cuInit(unsigned int flags) {
  if (owner != 0) return owner == getpid() ? OK : NOT_INITIALIZED;
  if (getenv("FAKE_CRASH") != NULL) abort();
  FILE* diary = fopen(getenv("FAKE_DIARY"), "a");
  fprintf(diary, "%d\n", (int)getpid());
  fclose(diary);
  if (gpus() == 0) return NO_DEVICE;
  owner = getpid();
  return OK;
}
int cuGetErrorName(int error, const char** name) { *name = "CUDA_ERROR_OF_TEST"; return OK; }
int cuDeviceGetCount(int* count) {
  if (owner != getpid()) return NOT_INITIALIZED;
  *count = gpus();
  return OK;
}
int cuDeviceGet(int* device, int index) { *device = index; return OK; }
int cuDeviceGetName(char* name, int size, int device) { strcpy(name, "NVIDIA H200"); return OK; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)141 << 30; return OK; }
int cuDeviceGetPCIBusId(char* name, int size, int device) {
  sprintf(name, "0000:%02d:00.0", device);
  return OK;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 232448;
  return OK;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) { memset(uuid, device, 16); return OK; }
"""


def build_driver(folder: Path) -> dict[str, str]:
    """Compile the driver, and return the environment variables by which a process finds it."""
    source = folder / "driver.c"
    source.write_text(SOURCE, encoding="utf-8")
    library = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    diary = folder / "diary"
    diary.write_text("", encoding="utf-8")
    return {"LD_LIBRARY_PATH": str(folder), "FAKE_DIARY": str(diary)}
