"""Asks the NVIDIA driver for its version and its GPUs, through ctypes.

This needs no toolkit, torch or context: libcuda answers attribute queries after `cuInit`.
"""

from __future__ import annotations

import ctypes
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..binaries.files import read_if_possible
from ..targets.devices import Device, Driver, format_version
from .nvml import CallError, read_driver_release

if TYPE_CHECKING:
    from collections.abc import Iterable

LIBRARY: Final = "libcuda.so.1"

# CUdevice_attribute
_SM_COUNT = 16
_MAJOR = 75
_MINOR = 76
_SMEM_OPTIN = 97

_NO_DEVICE = 100
_CODE = re.compile(r"\bcu\w+ failed with (?:error |\w+ \()(\d+)")  # matches the messages of `_call`
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """One GPU in CUDA's order, or an imagined GPU, as with `--gpu`."""

    index: int
    name: str
    device: Device
    memory_bytes: int | None = None
    sm_count: int | None = None
    smem_optin: int | None = None  # maximum bytes of shared memory per block
    pci: str = ""
    uuid: str = ""  # in the form of nvidia-smi: GPU-...

    def to_json(self) -> dict[str, Any]:
        """Return the GPU as plain data."""
        return {
            "index": self.index,
            "name": self.name,
            "compute_capability": str(self.device),
            "memory_bytes": self.memory_bytes,
            "sm_count": self.sm_count,
            "smem_optin": self.smem_optin,
            "pci": self.pci,
            "uuid": self.uuid,
        }


@dataclass(frozen=True)
class Cuda:
    """The driver and its GPUs.

    `absent` means that libcuda was not found, `broken` that it does not load or that a call failed.
    `reason` describes the failure, or says that there is no GPU.
    """

    status: Literal["ok", "absent", "broken"]
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    reason: str = ""

    @property
    def code(self) -> int | None:
        """The error code (CUresult) of the call that failed; None for another cause."""
        match = _CODE.search(self.reason)
        return int(match[1]) if match else None

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        driver = self.driver
        return {
            "status": self.status,
            "reason": self.reason or None,
            "driver_release": (driver.release or None) if driver else None,
            "driver_cuda": format_version(driver.cuda) if driver else None,
            "gpus": [gpu.to_json() for gpu in self.gpus],
        }


def imagine_cuda(devices: Iterable[Device], driver: Driver | None) -> Cuda:
    """Return the `Cuda` of an imaginary machine with these GPUs and this driver."""
    gpus = tuple(
        Gpu(index, "", device, smem_optin=device.smem_optin) for index, device in enumerate(devices)
    )
    return Cuda("ok", driver, gpus)


def read_cuda() -> Cuda:
    """Ask libcuda; return a failure as a status instead of raising it.

    This initialises CUDA in this process: children forked later cannot use CUDA, see apart.py.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        missing = "No such file" in str(error)
        reason = "libcuda.so.1 was not found" if missing else f"libcuda.so.1 does not load: {error}"
        return Cuda("absent" if missing else "broken", reason=reason)
    driver: Driver | None = None
    try:
        number, count = ctypes.c_int(), ctypes.c_int()
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        driver = Driver.from_cuda_version(number.value, read_release())
        _call(library, "cuInit", ctypes.c_uint(0))
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        gpus = [_read_gpu(library, index) for index in range(count.value)]
        return Cuda("ok", driver, tuple(gpus))
    except CallError as error:
        if error.code == _NO_DEVICE:
            return Cuda("ok", driver, reason=str(error))
        return Cuda("broken", driver, reason=str(error))
    except AttributeError as error:
        return Cuda("broken", driver, reason=f"libcuda.so.1 lacks a function: {error}")


def read_release() -> str:
    """Read the driver's release, such as `580.65.06`, from /proc or NVML; empty if unknown."""
    text = read_if_possible(_KERNEL_MODULE)
    return parse_release(text) if text else read_driver_release()


def parse_release(text: str) -> str:
    """Find the release in the text of `/proc/driver/nvidia/version`; empty if there is none."""
    match = re.search(r"Kernel Module\D*?(?:for \S+\s+)?([0-9]{3,4}(?:\.[0-9]+)+)", text)
    return match[1] if match else ""


def _read_gpu(library: ctypes.CDLL, index: int) -> Gpu:
    handle = ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
    name, pci = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    memory = ctypes.c_size_t()
    _call(library, "cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    _call(library, "cuDeviceGetPCIBusId", pci, ctypes.c_int(len(pci)), handle)
    return Gpu(
        index=index,
        name=name.value.decode("utf-8", "replace"),
        device=Device(_attribute(library, handle, _MAJOR), _attribute(library, handle, _MINOR)),
        memory_bytes=memory.value,
        sm_count=_attribute(library, handle, _SM_COUNT),
        smem_optin=_attribute(library, handle, _SMEM_OPTIN),
        pci=pci.value.decode("ascii", "replace"),
        uuid=_read_uuid(library, handle),
    )


def _read_uuid(library: ctypes.CDLL, handle: ctypes.c_int) -> str:
    """Return the UUID of a GPU; empty if the driver is too old to report it."""
    raw = (ctypes.c_ubyte * 16)()
    try:
        _call(library, "cuDeviceGetUuid_v2", raw, handle)
    except (CallError, AttributeError):
        return ""
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def _attribute(library: ctypes.CDLL, handle: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    _call(library, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), handle)
    return value.value


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:  # noqa: ANN401 - ctypes values
    code = getattr(library, name)(*arguments)
    if code:
        raise CallError(code, f"{name} failed with {_error_name(library, code)}")


def _error_name(library: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    if library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) or not text.value:
        return f"error {code}"
    return f"{text.value.decode('ascii', 'replace')} ({code})"
