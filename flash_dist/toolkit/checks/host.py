"""Explains an absent driver or GPU, and unusual driver setups, from properties of the host.

The driver check reports the result of `explain_no_gpu` if it finds a cause. The error numbers are
those of the CUDA Driver API (CUresult).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings import host as ids
from ..findings.result import CheckResult
from ..machine.nvml import VERSION_MISMATCH
from ..targets.devices import format_version
from ..targets.wording import list_few

if TYPE_CHECKING:
    from ..findings.entry import Entry
    from ..machine.host import Host
    from .environment import Environment

_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
_MISMATCH = 803  # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
_COMPAT_REFUSED = 804  # CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
# CUDA error codes that do not name the cause, so the host is examined for it. None: no code.
_UNSURE = {None, 3, 100, 101, 304, _MISMATCH, _COMPAT_REFUSED, 999}
_SHOWN_FILES = 4

_START_WITH_GPU = {
    "kubernetes": "give the container `nvidia.com/gpu: 1` in resources.limits",
    "podman": "start it with `podman run --device nvidia.com/gpu=all`",
}
_START_DOCKER = "start it with `docker run --gpus all`, which needs the NVIDIA Container Toolkit"

_WSL_NOTE = (
    "WSL: this is the driver of Windows; update it there, and install none in the distribution"
)


def explain_no_gpu(environment: Environment) -> CheckResult | None:
    """Say why CUDA shows no GPU; None if properties of the host do not explain it."""
    host, cuda = environment.host, environment.cuda
    if host is None or cuda.gpus:
        return None
    if cuda.status == "absent":
        return _explain_absent(environment, host)
    if cuda.code not in _UNSURE:
        return None
    causes = (
        _explain_compat(environment, host),
        _explain_wsl(host),
        _explain_mismatch(environment, host),
        _explain_files(host),
    )
    return next((cause for cause in causes if cause is not None), None)


def _explain_absent(environment: Environment, host: Host) -> CheckResult | None:
    """Explain why libcuda is missing; None if the host shows no sign of a driver or of WSL."""
    if host.stray_libcuda:
        folder = host.stray_libcuda.rpartition("/")[0]
        summary = f"libcuda.so.1 is in {folder}, which the loader does not search"
        kept = ":$LD_LIBRARY_PATH" if environment.variables.get("LD_LIBRARY_PATH") else ""
        return _fail(summary, f"`export LD_LIBRARY_PATH={folder}{kept}`", ids.LIBCUDA_NOT_ON_PATH)
    if host.wsl:
        summary = "no NVIDIA driver here: WSL has no /usr/lib/wsl/lib/libcuda.so.1"
        fix = "install the NVIDIA driver in Windows, then `wsl --update` and `wsl --shutdown`"
        return CheckResult("skip", summary, fix=fix, entry=ids.WSL_WITHOUT_DRIVER)
    if not (host.module_release or host.device_files):
        return None
    asked = environment.variables.get(_CAPABILITIES, "")
    if asked and not {"compute", "all"} & {word.strip() for word in asked.split(",")}:
        summary = f"{_CAPABILITIES}={asked} lacks `compute`: this container got no libcuda.so.1"
        fix = f"start the container with `-e {_CAPABILITIES}=compute,utility`"
        return _fail(summary, fix, ids.CAPABILITIES_WITHOUT_COMPUTE)
    driver = f"driver {host.module_release}" if host.module_release else "an NVIDIA driver"
    count = f" and {host.module_gpus} GPU{'s' * (host.module_gpus > 1)}" if host.module_gpus else ""
    if host.container:
        summary = (
            f"this container was started without its GPUs: the host has {driver}{count}, the "
            "container no libcuda.so.1"
        )
        fix = _START_WITH_GPU.get(host.container, _START_DOCKER)
        return _fail(summary, fix, ids.CONTAINER_WITHOUT_GPU)
    summary = f"the kernel module of {driver} is loaded, but libcuda.so.1 is not installed"
    fix = "install the driver's compute libraries of that release (Debian: libcuda1, Ubuntu: "
    return _fail(summary, f"{fix}libnvidia-compute)", ids.LIBCUDA_MISSING)


def _explain_compat(environment: Environment, host: Host) -> CheckResult | None:
    reason, code = environment.cuda.reason, environment.cuda.code
    refused = code == _COMPAT_REFUSED
    if not (refused or (host.libcuda_kind == "compat" and code == _MISMATCH)):
        return None
    what = "this GPU" if refused else f"the kernel module {host.module_release}".rstrip()
    summary = f"the cuda-compat library {host.libcuda} does not work with {what}: {reason}"
    fix = (
        "remove its folder from LD_LIBRARY_PATH and /etc/ld.so.conf.d, and install a driver that "
        "is new enough; cuda-compat is for data-center GPUs"
    )
    return _fail(summary, fix, ids.CUDA_COMPAT_REFUSED)


def _explain_wsl(host: Host) -> CheckResult | None:
    if not (host.wsl and host.libcuda_kind == "driver" and host.libcuda_release):
        return None  # Windows' libcuda.so.1.1 has no release in its name
    summary = f"WSL needs the libcuda of Windows' driver, but {host.libcuda} was loaded"
    fix = "remove the NVIDIA driver from this distribution; /usr/lib/wsl/lib has the right one"
    return _fail(summary, fix, ids.WSL_LINUX_DRIVER)


def _explain_mismatch(environment: Environment, host: Host) -> CheckResult | None:
    loaded, module = host.libcuda_release, host.module_release
    broken = environment.cuda.status == "broken"
    differ = bool(broken and loaded and module and loaded != module)
    told = environment.cuda.code == _MISMATCH or host.nvml.code == VERSION_MISMATCH
    if not (differ or told):
        return None
    if differ:
        summary = f"libcuda.so.1 is of driver {loaded}, the kernel module of {module}"
    else:
        summary = "libcuda.so.1 and the kernel module are of different driver releases"
    again = "start the container again" if host.container else "reboot"
    return _fail(summary, f"after an update of the driver, {again}", ids.DRIVER_MODULE_MISMATCH)


def _explain_files(host: Host) -> CheckResult | None:
    if host.denied:
        return _fail(_describe_denied(host), _PERMISSION_FIX, ids.DEVICE_PERMISSION)
    if host.module_release and not host.device_files and not host.wsl:
        summary = f"there is no /dev/nvidia*, although the kernel module {host.module_release} is"
        if host.container:
            fix = _START_WITH_GPU.get(host.container, _START_DOCKER)
        else:
            fix = "`sudo nvidia-smi && sudo nvidia-modprobe -u` creates them"
        return _fail(f"{summary} loaded", fix, ids.DEVICE_FILES_MISSING)
    return None


_PERMISSION_FIX = (
    "`ls -l /dev/nvidia*` shows which group may: join it, such as `sudo usermod -aG video $USER`, "
    "and log in again"
)


def _describe_denied(host: Host) -> str:
    return f"this user cannot open {list_few(host.denied, _SHOWN_FILES)}"


def _fail(summary: str, fix: str, entry: Entry) -> CheckResult:
    return CheckResult("fail", summary, fix=fix, entry=entry)


def describe_driver(environment: Environment) -> tuple[str, ...]:
    """Say if a working driver is that of Windows under WSL, and if NVML does not answer."""
    host = environment.host
    if host is None or not environment.cuda.gpus:
        return ()
    lines = [_WSL_NOTE] if host.wsl else []
    if host.nvml.status != "ok":
        lines.append(f"NVML does not answer, so hidden GPUs are unknown: {host.nvml.reason}")
    return tuple(lines)


def check_devices(environment: Environment) -> CheckResult | None:
    """Check that this process may open the device files; None if so, or if CUDA shows no GPU."""
    host = environment.host
    if host is None or not host.denied or not environment.cuda.gpus:
        return None
    summary = f"{_describe_denied(host)}: CUDA does not show these GPUs"
    return CheckResult("warn", summary, fix=_PERMISSION_FIX, entry=ids.DEVICE_PERMISSION)


def check_compat(environment: Environment) -> CheckResult | None:
    """Report a libcuda from cuda-compat, or of another release than the kernel module."""
    host, driver = environment.host, environment.cuda.driver
    if host is None or driver is None or not environment.cuda.gpus:
        return None
    loaded, module = host.libcuda_release, host.module_release
    if host.libcuda_kind != "compat" and not (loaded and module and loaded != module):
        return None
    kernel = f"kernel module {module}" if module else "this kernel module"
    speaks = f"{host.libcuda} supports CUDA {format_version(driver.cuda)} on {kernel}"
    if loaded and module and _number(loaded) < _number(module):
        summary = f"cuda-compat is older than the driver that it replaces: {speaks}"
        fix = f"remove {host.libcuda.rpartition('/')[0]} from LD_LIBRARY_PATH and /etc/ld.so.conf.d"
        return CheckResult("warn", summary, fix=fix, entry=ids.CUDA_COMPAT_OLDER)
    detail = f"judged by CUDA {format_version(driver.cuda)}, not by the release of the driver"
    summary = f"cuda-compat is in use: {speaks}"
    return CheckResult("ok", summary, (detail,), entry=ids.CUDA_COMPAT)


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))
