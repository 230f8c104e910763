"""Reads a GPU's clock rate and power from NVML while it works."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from .nvml import LIBRARY, NvmlError, call, try_call

_CLOCK_SM: Final = 1  # nvmlClockType_t
_POWER_INSTANT: Final = 186  # NVML_FI_DEV_POWER_INSTANT


@dataclass(frozen=True)
class Reading:
    """NVML's values at one moment; None if unavailable."""

    clock_mhz: int | None = None  # of the multiprocessors
    power_w: float | None = None  # of the whole board


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t, with the unsigned int of its union, the type of the power."""

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


class Gauge:
    """Reads one GPU. Readings are None if NVML, the GPU or a value is unavailable.

    NVML stays initialised for the life of the process: a reading then takes microseconds.
    """

    def __init__(self, uuid: str, library: str = LIBRARY) -> None:
        """Find the GPU by its name in nvidia-smi, `GPU-...`."""
        self._handle = ctypes.c_void_p()
        self._nvml: ctypes.CDLL | None = None
        try:
            nvml = ctypes.CDLL(library)
            call(nvml, "nvmlInit_v2")
            name = ctypes.c_char_p(uuid.encode())
            call(nvml, "nvmlDeviceGetHandleByUUID", name, ctypes.byref(self._handle))
        except (OSError, NvmlError, AttributeError):
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
        return clock.value if try_call(nvml, "nvmlDeviceGetClockInfo", *arguments) else None

    def _read_power(self, nvml: ctypes.CDLL) -> float | None:
        """Return the current power; the mean of a second if GPU or driver cannot tell it."""
        field = _FieldValue(field=_POWER_INSTANT)
        one = ctypes.c_int(1)
        known = try_call(nvml, "nvmlDeviceGetFieldValues", self._handle, one, ctypes.byref(field))
        if known and field.code == 0:
            return float(field.value) / 1e3
        milliwatts = ctypes.c_uint()
        known = try_call(nvml, "nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(milliwatts))
        return milliwatts.value / 1e3 if known else None
