"""Findings on why a library will not load: a sentence for each cause, and its fix."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..binaries.demangle import demangle
from ..findings.driver import DRIVER_ABSENT
from ..findings.install import LIBC_UNSUPPORTED, TORCH_ABSENT, TORCH_CPU_BUILD
from ..findings.loading import (
    GLIBC_TOO_OLD,
    LIBRARY_BROKEN,
    LIBRARY_MISSING,
    LIBRARY_TOO_OLD,
    LIBSTDCXX_TOO_OLD,
    PYTHON_ABI,
    TORCH_SYMBOL_MISSING,
    WRONG_ARCHITECTURE,
)
from ..findings.result import Finding
from ..targets.advice import GET_DRIVER, GET_GLIBC, torch_fix
from ..targets.distributions import oldest_served
from ..targets.wording import list_few

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..machine.torch_install import Torch
    from .linker import Found, Missing

_SHOWN_RELEASES = 3
_SHOWN_SYMBOLS = 4
_LONGEST = 200  # maximum characters of a demangled name

_MACHINES = {3: "x86", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64"}
_MACHINES |= {243: "riscv64", 258: "loongarch64"}

_DRIVER = {"libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"}
_GLIBC = re.compile(r"2\.([0-9]{1,4})")
_CUDA_MAJOR = re.compile(r"lib(?:cudart|nvrtc|cublas|cublasLt)\.so\.([0-9]+)(?:\.[0-9]+)*")
_DEBIAN = {
    "libgomp.so.1": "libgomp1",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libnuma.so.1": "libnuma1",
    "libgfortran.so.5": "libgfortran5",
}
_TORCH_CUDA = re.compile(r"lib(?:torch|c10)_cuda(?:_\w+)?\.so")
_TORCH_LIBRARY = re.compile(r"lib(?:torch|c10|caffe2)\w*\.so")
# Symbols that are defined in a namespace of torch; a type of torch among the arguments does not
# suffice.
_TORCH_CPP = re.compile(r"_Z(?:T[VIST]|GV)?NK?(?:3c10|2at|5torch|6caffe2)")
_TORCH_C = re.compile(r"(?:aoti_)?torch_\w+")
_CUDA_SYMBOL = re.compile(r"_Z(?:T[VIST])?NK?(?:3c10|2at|5torch)4cuda|(?:aoti_)?torch_\w*cuda\w*")


def name_machine(machine: int, bits: int = 64) -> str:
    """Name the machine of an ELF header: `aarch64`."""
    name = _MACHINES.get(machine, f"machine {machine} of the ELF standard")
    return "x32" if (machine, bits) == (62, 32) else name


def is_torch_library(name: str) -> bool:
    """Tell if a needed library belongs to torch."""
    return _TORCH_LIBRARY.fullmatch(name) is not None


def is_torch_symbol(name: str) -> bool:
    """Tell if only torch defines a symbol."""
    return bool(_TORCH_CPP.match(name) or _TORCH_C.fullmatch(name))


def wrong_architecture(file: str, compiled: str, host: str) -> Finding:
    """Return the finding that a file is for another kind of CPU."""
    sentence = f"{file} is compiled for {compiled}, this Python runs on {host}"
    return Finding(WRONG_ARCHITECTURE, sentence, fix=f"install a build for {host}")


def other_python(file: str, built: str, running: str) -> Finding:
    """Return the finding that a file name names another Python: this Python ignores the file."""
    fix = f"install a build for Python {running}, or use {built}"
    if running.endswith("t") and "abi3" in built:
        fix = f"use Python {running[:-1]}, which has the GIL: free-threaded ones do not load abi3"
    return Finding(PYTHON_ABI, f"{file} is for {built}, this is Python {running}", fix=fix)


def python_symbol(file: str, names: Sequence[str], running: str) -> Finding:
    """Return the finding that a file calls a function that this Python lacks."""
    sentence = f"{file} needs `{names[0]}`, which Python {running} does not have"
    fix = f"install a build for Python {running}"
    return Finding(PYTHON_ABI, sentence, _more(names[1:]), fix)


def no_glibc(file: str, libc: str) -> Finding:
    """Return the finding that a file needs glibc, but the system has another C library."""
    sentence = f"{file} is built for glibc, this system has {libc}"
    return Finding(LIBC_UNSUPPORTED, sentence, fix=GET_GLIBC)


def old_glibc(file: str, version: str, libc: str) -> Finding:
    """Return the finding that a file needs a newer glibc."""
    needed = version.removeprefix("GLIBC_")
    sentence = f"{file} needs glibc {needed}, this system has {libc}"
    number = _GLIBC.match(needed)
    known = oldest_served(int(number[1]))[:_SHOWN_RELEASES] if number else []
    such = f" ({', '.join(known)} or newer)" if known else ""
    fix = f"use a system with glibc {needed} or newer{such}, or a build for {libc}"
    return Finding(GLIBC_TOO_OLD, sentence, fix=fix)


def old_libstdcxx(file: str, version: str, found: Found, newest: str, *, conda: bool) -> Finding:
    """Return the finding that a file needs a newer C++ library than the loader would load."""
    sentence = f"{file} needs {version}, {found} has up to {newest}"
    if found.fix:
        fix = found.fix
    elif conda:
        fix = "`conda install -c conda-forge libstdcxx-ng` installs a newer one"
    else:
        fix = "use a newer distribution or image, or a build for this one"
    return Finding(LIBSTDCXX_TOO_OLD, sentence, fix=fix)


def old_library(file: str, version: str, found: Found) -> Finding:
    """Return the finding that another library lacks a symbol version that a file needs."""
    sentence = f"{file} needs {version}, which {found} does not have"
    fix = found.fix or f"install a newer {found.path.rsplit('/', 1)[-1]}"
    return Finding(LIBRARY_TOO_OLD, sentence, fix=fix)


def broken_library(file: str, name: str, found: Found, reason: str) -> Finding:
    """Return the finding that the loader would take a file that is damaged or not a library."""
    sentence = f"{file} needs `{name}`, for which the loader takes {found}: {reason}"
    fix = found.fix or f"reinstall the package that {found.path} belongs to"
    return Finding(LIBRARY_BROKEN, sentence, fix=fix)


def torch_absent(file: str, oldest: str = "") -> Finding:
    """Return the finding that a file needs torch, which is absent."""
    sentence = f"{file} needs torch, which is not installed"
    return Finding(TORCH_ABSENT, sentence, fix=torch_fix(oldest))


def cpu_torch(file: str, needs: str, torch: Torch) -> Finding:
    """Return the finding that a file needs the CUDA part of torch, which this torch lacks."""
    needed = readable(needs)
    sentence = f"{file} needs `{needed}`, and torch {torch.version} is a build without CUDA"
    release = torch.version.partition("+")[0]
    fix = (
        f"`pip uninstall -y torch`, then `pip install torch=={release} --index-url "
        "https://pypi.org/simple` installs a CUDA build"
    )
    return Finding(TORCH_CPU_BUILD, sentence, fix=fix)


def is_cuda_part(name: str) -> bool:
    """Tell if a library or symbol exists only in CUDA builds of torch."""
    return bool(_TORCH_CUDA.fullmatch(name) or _CUDA_SYMBOL.match(name))


def torch_symbols(file: str, names: Sequence[str], torch: Torch, oldest: str = "") -> Finding:
    """Return the finding that a file was compiled against another torch."""
    shown = [readable(name) for name in names[:_SHOWN_SYMBOLS]]
    stable = all(_TORCH_C.fullmatch(name) for name in names)
    release = ".".join(torch.version.split(".")[:2])
    which = "a newer torch" if stable else "another torch"
    sentence = (
        f"{file} is built for {which}: it needs `{shown[0]}`, "
        f"which torch {torch.version} does not have"
    )
    if stable:
        newest = "`pip install --upgrade torch`, then reinstall what was compiled for the old one"
        fix = torch_fix(oldest) if oldest else newest
    else:
        fix = f"install a build for torch {release}, or the torch that this one was built for"
    old_strings = any("std::string" in name and "__cxx11" not in name for name in shown)
    note = "it is compiled for the old C++ ABI, which torch's wheels dropped with 2.6 and 2.7"
    more = _more([*shown[1:], *names[_SHOWN_SYMBOLS:]])
    return Finding(TORCH_SYMBOL_MISSING, sentence, (note, *more) if old_strings else more, fix)


def is_driver_part(name: str) -> bool:
    """Tell if a library belongs to the NVIDIA driver."""
    return name in _DRIVER


def missing_driver(file: str, missing: Missing) -> Finding:
    """Return the finding that a driver library, which a file needs directly or not, is absent."""
    through = _name_user(missing)
    sentence = f"{file} needs `{missing.name}`{through} of the NVIDIA driver, which was not found"
    return Finding(DRIVER_ABSENT, sentence, fix=GET_DRIVER)


def missing_libraries(file: str, missing: Sequence[Missing], torch: Torch) -> Finding:
    """Return the finding that direct or indirect dependencies of a file are absent."""
    names = [f"`{one.name}`{_name_user(one)}" for one in missing]
    which = "which was" if len(names) == 1 else "which were"
    listed = list_few(names, _SHOWN_SYMBOLS)
    sentence = f"{file} needs {listed}, {which} not found by the dynamic linker"
    return Finding(LIBRARY_MISSING, sentence, fix=_library_fix(missing[0].name, torch))


def _name_user(missing: Missing) -> str:
    return f" (for {missing.needed_by})" if missing.needed_by else ""


def _library_fix(name: str, torch: Torch) -> str:
    cuda = _CUDA_MAJOR.fullmatch(name)
    if cuda is not None and torch.cuda and torch.cuda.split(".", maxsplit=1)[0] != cuda[1]:
        return f"install a build for CUDA {torch.cuda}, which torch {torch.version} comes with"
    if name in _DEBIAN:
        return f"`apt-get install {_DEBIAN[name]}` (Debian, Ubuntu), or the package that has it"
    if cuda is not None:
        return f"install the libraries of CUDA {cuda[1]}, or add their folder to LD_LIBRARY_PATH"
    return "install the package that has it, or add its folder to LD_LIBRARY_PATH"


def _more(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    shown = tuple(f"also `{_shorten(name)}`" for name in names[: _SHOWN_SYMBOLS - 1])
    rest = len(names) - len(shown)
    return (*shown, f"and {rest} more symbols") if rest > 0 else shown


def readable(name: str) -> str:
    """Return a symbol demangled and shortened."""
    return _shorten(demangle(name))


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
