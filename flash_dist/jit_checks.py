"""Checks of the driver's JIT compiler and its cache, where some kernel needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .first_start import describe_cost, is_set, uses_jit
from .gpu_checks import judge_gpu
from .jit_cache import ENOUGH_BYTES, JitCache, read_limit
from .result import CheckResult

if TYPE_CHECKING:
    from .environment import Environment
    from .host import Host

_MIB = 1 << 20


def check_jit(environment: Environment) -> CheckResult | None:
    """The JIT has its compiler and a cache; None where that is so, or no kernel needs it."""
    problem = _find_problem(environment)
    if problem is None or environment.installed.build is None:
        return None
    gpus = [gpu.index for gpu in environment.cuda.gpus if uses_jit(judge_gpu(environment, gpu))]
    return problem if gpus else None


def _find_problem(environment: Environment) -> CheckResult | None:
    host, variables = environment.host, environment.variables
    if host is not None and _lacks_compiler(host):
        return CheckResult(
            "jit",
            "fail",
            f"libnvidia-ptxjitcompiler.so.1 is not there, which belongs to {host.libcuda}: PTX "
            "cannot be compiled for this GPU",
            fix="install a build that has SASS for this GPU, or the whole driver; a container gets "
            "it with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            id="jit-compiler-absent",
        )
    if is_set(variables, "CUDA_CACHE_DISABLE"):
        return _slow(
            environment,
            "CUDA_CACHE_DISABLE is set",
            "`unset CUDA_CACHE_DISABLE`",
            "jit-cache-disabled",
        )
    limit = read_limit(variables.get("CUDA_CACHE_MAXSIZE", ""))
    if limit < ENOUGH_BYTES:
        return _slow(
            environment,
            f"CUDA_CACHE_MAXSIZE={limit} is too small a cache for the compiled kernels",
            f"`unset CUDA_CACHE_MAXSIZE`, or give it {ENOUGH_BYTES} or more",
            "jit-cache-small",
        )
    return _judge_folder(environment, host.cache) if host and host.cache else None


def _lacks_compiler(host: Host) -> bool:
    """Whether the library is missing for certain: WSL keeps it in the folders of Windows."""
    return bool(host.libcuda) and not host.jit_compiler and not host.wsl


def _judge_folder(environment: Environment, cache: JitCache) -> CheckResult | None:
    elsewhere = "`export CUDA_CACHE_PATH=/path/to/folder` puts it where there is room"
    if cache.status == "homeless":
        reason = "the JIT cache has no folder: neither HOME nor CUDA_CACHE_PATH is set"
        return _slow(environment, reason, elsewhere, "jit-cache-homeless")
    if cache.status == "read-only":
        reason = f"the JIT cache {cache.folder} may not be written"
        fix = "`export CUDA_CACHE_PATH=/path/to/folder` puts it where you may write"
        return _slow(environment, reason, fix, "jit-cache-read-only")
    if cache.free_bytes is not None and cache.free_bytes < ENOUGH_BYTES:
        free = f"{cache.free_bytes / _MIB:.0f} MiB"
        reason = f"the JIT cache {cache.folder} is on a full disk ({free} free)"
        return _slow(environment, reason, elsewhere, "jit-cache-full")
    return None


def _slow(environment: Environment, reason: str, fix: str, cause: str) -> CheckResult:
    return CheckResult(
        "jit",
        "warn",
        f"{reason}: the driver compiles the PTX again at every start",
        (describe_cost(environment.variables),),
        fix,
        cause,
    )
