"""Asks NVML through ctypes for the physical GPUs that `nvidia-smi` lists, their clock and power.

CUDA shows a process only the GPUs that its environment variables allow; NVML shows all GPUs. NVML
and nvidia-smi number GPUs in PCI bus order (NVML API Reference, "nvmlDeviceGetHandleByIndex";
nvidia-smi manual).
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..targets.devices import Device

LIBRARY: Final = "libnvidia-ml.so.1"

# nvmlReturn_t
_NO_PERMISSION = 4
_NO_DRIVER = 9
VERSION_MISMATCH: Final = 18

_CLOCK_SM: Final = 1  # nvmlClockType_t
_POWER_INSTANT: Final = 186  # NVML_FI_DEV_POWER_INSTANT
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE, NVML_DEVICE_UUID_V2_BUFFER_SIZE
_MOST_GPUS = 256
_MOST_INSTANCES = 64


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU in MIG mode; CUDA shows it as a GPU."""

    name: str
    uuid: str


@dataclass(frozen=True)
class PhysicalGpu:
    """One GPU in the order of nvidia-smi, whether or not CUDA shows it."""

    index: int
    name: str
    uuid: str = ""
    pci: str = ""
    device: Device | None = None
    mig: bool = False
    instances: tuple[MigInstance, ...] = ()

    @property
    def place(self) -> str:
        """The PCI address in a form that can be compared with CUDA's."""
        return normalize_pci(self.pci)

    def to_json(self) -> dict[str, Any]:
        """Return the GPU as plain data."""
        return {
            "index": self.index,
            "name": self.name,
            "uuid": self.uuid or None,
            "pci": self.pci or None,
            "compute_capability": str(self.device) if self.device else None,
            "mig": self.mig,
            "mig_instances": [vars(instance) for instance in self.instances],
        }


@dataclass(frozen=True)
class Nvml:
    """The GPUs that NVML reports.

    `absent` means that the library was not found, `broken` that it does not load or that a call
    failed. `reason` describes the failure.
    """

    status: Literal["ok", "absent", "broken"]
    gpus: tuple[PhysicalGpu, ...] = ()
    reason: str = ""
    code: int = 0  # nvmlReturn_t of the call that failed

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "status": self.status,
            "reason": self.reason or None,
            "gpus": [gpu.to_json() for gpu in self.gpus],
        }


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t; its union is declared as an unsigned int, the type of power values."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_uint),
        ("code", ctypes.c_int),
        ("value", ctypes.c_uint),
        ("padding", ctypes.c_uint),
    )


class CallError(Exception):
    """A call of NVML or libcuda failed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def normalize_pci(text: str) -> str:
    """Return `0:3b:0` for `00000000:3B:00.0` (NVML) and `0000:3b:00.0` (CUDA); keep other text."""
    match = re.fullmatch(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)\.[0-9a-fA-F]+", text)
    if match is None:
        return text
    return ":".join(f"{int(part, 16):x}" for part in match.groups())


def read_nvml(library: str = LIBRARY) -> Nvml:
    """Ask NVML for its GPUs; return a failure as a status instead of raising it."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        missing = "No such file" in str(error)
        reason = f"{LIBRARY} was not found" if missing else f"{LIBRARY} does not load: {error}"
        return Nvml("absent" if missing else "broken", reason=reason)
    try:
        _call(nvml, "nvmlInit_v2")
        try:
            return Nvml("ok", tuple(_read_gpus(nvml)))
        finally:
            _try_call(nvml, "nvmlShutdown")
    except CallError as error:
        return Nvml("broken", reason=str(error), code=error.code)
    except AttributeError as error:
        return Nvml("broken", reason=f"{LIBRARY} lacks a function: {error}")


def read_driver_release(library: str = LIBRARY) -> str:
    """Ask NVML for the driver's release, such as `580.65.06`; empty if unknown."""
    try:
        nvml = ctypes.CDLL(library)
        _call(nvml, "nvmlInit_v2")
    except (OSError, CallError, AttributeError):
        return ""
    text = ctypes.create_string_buffer(_NAME_BYTES)
    known = _try_call(nvml, "nvmlSystemGetDriverVersion", text, ctypes.c_uint(_NAME_BYTES))
    _try_call(nvml, "nvmlShutdown")
    return text.value.decode("ascii", "replace") if known else ""


def _read_gpus(nvml: ctypes.CDLL) -> list[PhysicalGpu]:
    """Read the GPUs that this process may access; each keeps its number among all GPUs."""
    count = ctypes.c_uint()
    _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    gpus = []
    for index in range(min(count.value, _MOST_GPUS)):
        handle = ctypes.c_void_p()
        function = "nvmlDeviceGetHandleByIndex_v2"
        if _try_call(nvml, function, ctypes.c_uint(index), ctypes.byref(handle)):
            gpus.append(_read_gpu(nvml, index, handle))
    return gpus


def _read_gpu(nvml: ctypes.CDLL, index: int, handle: ctypes.c_void_p) -> PhysicalGpu:
    mode, pending, pci = ctypes.c_uint(), ctypes.c_uint(), _PciInfo()
    major, minor = ctypes.c_int(), ctypes.c_int()
    # This call fails on GPUs without MIG.
    _try_call(nvml, "nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(pending))
    has_pci = _try_call(nvml, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    function = "nvmlDeviceGetCudaComputeCapability"
    known = _try_call(nvml, function, handle, ctypes.byref(major), ctypes.byref(minor))
    return PhysicalGpu(
        index,
        _read_text(nvml, "nvmlDeviceGetName", handle),
        _read_text(nvml, "nvmlDeviceGetUUID", handle),
        bytes(pci.bus_id).decode("ascii", "replace") if has_pci else "",
        Device(major.value, minor.value) if known else None,
        mig=bool(mode.value),
        instances=tuple(_read_instances(nvml, handle)) if mode.value else (),
    )


def _read_text(nvml: ctypes.CDLL, function: str, handle: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_NAME_BYTES)
    known = _try_call(nvml, function, handle, text, ctypes.c_uint(_NAME_BYTES))
    return text.value.decode("utf-8", "replace") if known else ""


def _read_instances(nvml: ctypes.CDLL, gpu: ctypes.c_void_p) -> list[MigInstance]:
    """Read the MIG instances of a GPU; skip indices without an instance."""
    most = ctypes.c_uint()
    _try_call(nvml, "nvmlDeviceGetMaxMigDeviceCount", gpu, ctypes.byref(most))
    instances = []
    for index in range(min(most.value, _MOST_INSTANCES)):
        handle = ctypes.c_void_p()
        function = "nvmlDeviceGetMigDeviceHandleByIndex"
        if _try_call(nvml, function, gpu, ctypes.c_uint(index), ctypes.byref(handle)):
            name = _read_text(nvml, "nvmlDeviceGetName", handle)
            instances.append(MigInstance(name, _read_text(nvml, "nvmlDeviceGetUUID", handle)))
    return instances


@dataclass(frozen=True)
class Reading:
    """Values of one GPU at one moment, from NVML; None if unavailable."""

    clock_mhz: int | None = None  # of the multiprocessors
    power_w: float | None = None  # of the whole board


class Gauge:
    """Reads the clock and power of one GPU; None if NVML, the GPU or the value is unavailable.

    NVML stays initialised for the life of the process: a reading then takes microseconds.
    """

    def __init__(self, uuid: str, library: str = LIBRARY) -> None:
        """Find the GPU by its UUID in the form of nvidia-smi, `GPU-...`."""
        self._handle = ctypes.c_void_p()
        self._nvml: ctypes.CDLL | None = None
        try:
            nvml = ctypes.CDLL(library)
            _call(nvml, "nvmlInit_v2")
            name = ctypes.c_char_p(uuid.encode())
            _call(nvml, "nvmlDeviceGetHandleByUUID", name, ctypes.byref(self._handle))
        except (OSError, CallError, AttributeError):
            return
        self._nvml = nvml

    def read(self) -> Reading:
        """Read the current clock and power."""
        if self._nvml is None:
            return Reading()
        return Reading(self._read_clock(self._nvml), self._read_power(self._nvml))

    def _read_clock(self, nvml: ctypes.CDLL) -> int | None:
        clock = ctypes.c_uint()
        arguments = (self._handle, ctypes.c_int(_CLOCK_SM), ctypes.byref(clock))
        return clock.value if _try_call(nvml, "nvmlDeviceGetClockInfo", *arguments) else None

    def _read_power(self, nvml: ctypes.CDLL) -> float | None:
        """Return the current power in watts, or else the mean over a second, or else None."""
        field = _FieldValue(field=_POWER_INSTANT)
        one = ctypes.c_int(1)
        known = _try_call(nvml, "nvmlDeviceGetFieldValues", self._handle, one, ctypes.byref(field))
        if known and field.code == 0:
            return float(field.value) / 1e3
        milliwatts = ctypes.c_uint()
        known = _try_call(nvml, "nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(milliwatts))
        return milliwatts.value / 1e3 if known else None


def _try_call(nvml: ctypes.CDLL, name: str, *arguments: Any) -> bool:  # noqa: ANN401 - ctypes values
    """Call an optional function; return whether it succeeded."""
    try:
        _call(nvml, name, *arguments)
    except (CallError, AttributeError):
        return False
    return True


def _call(nvml: ctypes.CDLL, name: str, *arguments: Any) -> None:  # noqa: ANN401 - ctypes values
    code = getattr(nvml, name)(*arguments)
    if code:
        raise CallError(code, f"{name} failed: {_error_text(nvml, code)} ({code})")


def _error_text(nvml: ctypes.CDLL, code: int) -> str:
    known = {
        _NO_PERMISSION: "no permission",
        _NO_DRIVER: "the kernel module is not loaded",
        VERSION_MISMATCH: "the kernel module is of another version than the library",
    }
    if code in known:
        return known[code]
    try:
        function = nvml.nvmlErrorString
    except AttributeError:
        return "error"
    function.restype = ctypes.c_char_p
    text = function(ctypes.c_int(code))
    return text.decode("ascii", "replace") if text else "error"
