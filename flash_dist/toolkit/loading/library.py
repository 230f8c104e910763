"""The torch-free kernel library, through its C interface."""

from __future__ import annotations

import ctypes
import json
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..builds.package import PACKAGE, UNBUILT_HINT
from ..errors import ExtensionError
from ..product import KERNELS, PROGRAM, SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..targets.axes import Value

LIBRARY: Final = PACKAGE / KERNELS


@cache
def load_library() -> ctypes.CDLL:
    """Load the kernel library; needs neither torch nor a GPU.

    Raises:
        ExtensionError: The file is absent or the dynamic linker refuses it.
    """
    if not LIBRARY.is_file():
        message = f"the kernel library `{LIBRARY.name}` is not in {LIBRARY.parent}"
        raise ExtensionError(message, hint=UNBUILT_HINT)
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        message = f"the kernel library does not load: {error}"
        raise ExtensionError(message, hint=f"`{PROGRAM} doctor` finds the cause") from error
    getattr(library, f"{SYMBOLS}last_error").restype = ctypes.c_char_p
    for name in ("variants", "select", "last_variant"):
        getattr(library, f"{SYMBOLS}{name}_json").restype = ctypes.c_int64
    return library


def _function(name: str) -> Any:  # noqa: ANN401 - a C function
    return getattr(load_library(), f"{SYMBOLS}{name}")


def _read_json(call: Callable[[Any, ctypes.c_int64], int]) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON that a C function writes to a buffer; first ask it for the length."""
    size = 0
    while True:
        buffer = ctypes.create_string_buffer(size + 1) if size else None
        length = call(buffer, ctypes.c_int64(size + 1 if buffer is not None else 0))
        if length < 0:
            raise ExtensionError(_function("last_error")().decode(errors="replace"))
        if buffer is not None and length <= size:
            return json.loads(buffer.value)
        size = length


def variants() -> list[dict[str, Any]]:
    """Return every compiled kernel variant.

    Each has symbol, role, the axes of the package, family, target, threads and dynamic_smem.
    """
    return list(_read_json(_function("variants_json")))


def select(device: int, *, role: str | None = None, **axes: Value) -> list[dict[str, Any]]:
    """Ask the driver which variant of each kernel loads on a GPU, and why others were refused.

    Each item describes a kernel by its role and the axes of its key. `chosen` has symbol, family,
    plan, binary_version and ptx_version; `chosen` is None if no variant loads. `refused` has symbol
    and reason of every variant that was tried or ruled out. The call loads the requested kernels,
    and so compiles PTX.

    Args:
        device: Number of the GPU.
        role: Only kernels of this role.
        axes: Only kernels that serve a call with these values, such as dtype="bf16", head_dim=80.
    """
    given = {"role": role, **axes} if role else axes
    wanted = " ".join(f"{name}={value}" for name, value in given.items())
    ask, question = _function("select_json"), ctypes.c_char_p(wanted.encode())
    return list(_read_json(lambda buffer, size: ask(ctypes.c_int(device), question, buffer, size)))


def last_variant() -> dict[str, dict[str, Any]]:
    """Return the last variant that each role launched in this process.

    Maps a role such as "fwd" to device, symbol, family, plan, binary_version (compute capability of
    the SASS that the driver loaded, times 10) and ptx_version (of the PTX that was compiled to that
    SASS).
    """
    return dict(_read_json(_function("last_variant_json")))


@contextmanager
def recorded_plans() -> Iterator[list[dict[str, Any]]]:
    """Record the plans of this process's calls, from all threads; fill the list after the block.

    Each call has an entry with the library's decisions, followed by an entry for each launch with
    the symbol of its `kernel`.

    Raises:
        ExtensionError: The library does not load, or is too old to record plans.
    """
    try:
        record, read = _function("record_plans"), _function("plans_json")
    except AttributeError as error:
        message = f"the kernel library `{LIBRARY.name}` does not record plans"
        raise ExtensionError(message, hint="build it from the sources of this package") from error
    read.restype = ctypes.c_int64
    plans: list[dict[str, Any]] = []
    record(ctypes.c_int(1))
    try:
        yield plans
    finally:
        record(ctypes.c_int(0))
    plans.extend(_read_json(read))
