"""Predicts from symbol tables and names whether a library will load, without loading anything.

If symbols and names do not decide, the prediction is "unknown": a program may load further
libraries before it opens this one. Torch counts as imported, because every package that needs torch
imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..binaries.files import open_file
from ..binaries.segments import read_platform
from ..binaries.symbols import SharedObject, open_shared
from ..errors import FatbinError
from . import causes
from .linker import Closure, Loaded, LoadHost

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..binaries.view import Buffer
    from ..findings.result import Finding

_LIBSTDCXX = "libstdc++.so.6"
_GLIBC = re.compile(r"GLIBC_[0-9.]+")
_TAGGED = re.compile(r"[^.]+(\.(?:cpython|pypy|abi3)[^.]*\.so)")
_CPYTHON = re.compile(r"\.cpython-([0-9])([0-9]+)(t?).*")
_PYTHON_SYMBOL = re.compile(r"_?Py[A-Z_]\w*")
_PYTHON_KNOWN = "PyObject_Call"  # if it is found, the interpreter's symbols are readable


@dataclass(frozen=True)
class Prediction:
    """The predicted result of loading a library."""

    library: str
    causes: tuple[Finding, ...] = ()
    unknown: tuple[str, ...] = ()  # sentences on what was not predictable

    def __bool__(self) -> bool:
        return not self.causes

    @property
    def status(self) -> Literal["ok", "unknown", "failed"]:
        """The prediction in one word."""
        if self.causes:
            return "failed"
        return "unknown" if self.unknown else "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as plain data."""
        return {
            "library": self.library,
            "status": self.status,
            "causes": [
                {
                    "id": cause.id,
                    "summary": cause.summary,
                    "fix": cause.fix or None,
                    "details": list(cause.details),
                }
                for cause in self.causes
            ],
            "unknown": list(self.unknown),
        }


def predict_loading(
    library: Path,
    host: LoadHost,
    *,
    label: str = "",
    torch_min: str = "",
    siblings: Iterable[str] = (),
) -> Prediction:
    """Predict the result of loading a file.

    Args:
        library: An extension module or any other shared library.
        host: The environment.
        label: Name of the file in messages; empty for its file name.
        torch_min: The oldest torch that the file is built for, if known.
        siblings: Names of the other files in the package, which may load them first.

    Raises:
        FatbinError: The file cannot be read.
    """
    label = label or library.name
    with open_file(library) as file:
        found = _predict_platform(label, file.read(64), host)
    if found is not None:
        return found
    root = Loaded(open_shared(library), library.absolute())
    names = frozenset(siblings) - {library.name}
    return _Judge(root, host, library.name, label, names, torch_min).predict()


def predict_member(name: str, data: Buffer, siblings: Iterable[str], host: LoadHost) -> Prediction:
    """Predict the result of loading a member of an archive after installation.

    Args:
        name: Name of the member in the archive.
        data: Bytes of the member.
        siblings: The names of all members.
        host: The environment to install into.

    Raises:
        FatbinError: The member cannot be read.
    """
    file = Path(name).name
    found = _predict_platform(name, data[:64], host)
    if found is not None:
        return found
    names = frozenset(Path(one).name for one in siblings) - {file}
    return _Judge(Loaded(SharedObject(data)), host, file, name, names).predict()


def _predict_platform(file: str, header: bytes, host: LoadHost) -> Prediction | None:
    compiled, here = read_platform(header), host.linker.platform
    if compiled == here:
        return None
    names = [causes.name_machine(one.machine, one.bits) for one in (compiled, here)]
    return Prediction(file, (causes.wrong_architecture(file, *names),))


@dataclass
class _Judge:
    """Judges one library and everything that is loaded with it."""

    root: Loaded
    host: LoadHost
    file: str  # its name without folders
    label: str  # its name in messages
    siblings: frozenset[str] = frozenset()
    torch_min: str = ""

    def predict(self) -> Prediction:
        try:
            closure = self.host.linker.close(self.root, self.siblings)
            found: list[Finding | str] = [*self._judge_name(), *self._judge_libraries(closure)]
            found += self._judge_versions(closure)
            found = found or self._judge_symbols(closure)
        except FatbinError as error:
            return Prediction(self.label, unknown=(error.message,))
        doubts = tuple(one for one in found if isinstance(one, str))
        sure = tuple(one for one in found if not isinstance(one, str))
        return Prediction(self.label, sure, doubts)

    def _judge_name(self) -> Iterator[Finding]:
        """Compare the tag in an extension module's name with the interpreter's tag."""
        match = _TAGGED.fullmatch(self.file)
        stem = self.file.partition(".")[0]
        if match is None or match[1] in self.host.suffixes:
            return
        if not self.root.shared.defines(f"PyInit_{stem}") or self._has_twin(stem):
            return
        tag = _CPYTHON.fullmatch(match[1])
        built = (
            f"CPython {tag[1]}.{tag[2]}{tag[3]}" if tag else match[1].removesuffix(".so").strip(".")
        )
        yield causes.other_python(self.label, built, self.host.python)

    def _has_twin(self, stem: str) -> bool:
        """Tell if the package also has this module for the running Python."""
        names = {f"{stem}{suffix}" for suffix in self.host.suffixes}
        folder = self.root.path.parent if self.root.path is not None else None
        beside = any((folder / name).exists() for name in names) if folder is not None else False
        return beside or bool(names & self.siblings)

    def _judge_libraries(self, closure: Closure) -> Iterator[Finding]:
        """Yield findings on needed libraries that are absent or broken.

        If glibc, torch or the CUDA part of torch is absent, only that is reported.
        """
        torch = self.host.torch
        absent = {one.name: one for one in closure.missing}
        if absent.pop("libc.so.6", None) is not None:
            yield causes.no_glibc(self.label, self.host.libc)
            return
        if torch.status == "absent" and any(map(causes.is_torch_library, absent)):
            yield causes.torch_absent(self.label, self.torch_min)
            return
        cuda = next(filter(causes.is_cuda_part, absent), "")
        if cuda and self._is_cpu_torch():
            yield causes.cpu_torch(self.label, cuda, torch)
            return
        drivers = [one for one in absent.values() if causes.is_driver_part(one.name)]
        others = [one for one in absent.values() if one not in drivers]
        for broken in closure.broken:
            found = self.host.linker.explain(broken.path)
            yield causes.broken_library(self.label, broken.name, found, broken.reason)
        if others:
            yield causes.missing_libraries(self.label, others, torch)
        if drivers:
            yield causes.missing_driver(self.label, drivers[0])

    def _is_cpu_torch(self) -> bool:
        return self.host.torch.status == "ok" and not self.host.torch.cuda

    def _judge_versions(self, closure: Closure) -> Iterator[Finding]:
        """Check that the needed symbol versions are defined.

        The dynamic linker checks this before it looks up symbols.
        """
        seen: set[tuple[str, str]] = set()
        for one in closure.libraries.values():
            file = self.label if one is self.root or one.path is None else one.path.name
            absent: dict[str, list[str]] = {}
            for version in one.shared.versions_needed:
                provider = closure.libraries.get(version.file)
                defined = provider.shared.versions_defined if provider is not None else frozenset()
                if defined and version.name not in defined and not version.weak:
                    absent.setdefault(version.file, []).append(version.name)
            for provider_name, names in absent.items():
                newest = max(names, key=_version_key)
                if (file, provider_name) not in seen:
                    seen.add((file, provider_name))
                    yield self._describe_old(file, newest, closure.libraries[provider_name])

    def _describe_old(self, file: str, version: str, provider: Loaded) -> Finding:
        found = self.host.linker.explain(provider.path or Path())
        if _GLIBC.fullmatch(version):
            return causes.old_glibc(file, version, self.host.libc)
        if provider.path is not None and provider.path.name.startswith(_LIBSTDCXX):
            family = version.partition("_")[0] + "_"
            same = [one for one in provider.shared.versions_defined if one.startswith(family)]
            newest = max(same, key=_version_key, default="no such version")
            conda = self.host.prefix in provider.path.parents
            return causes.old_libstdcxx(file, version, found, newest, conda=conda)
        return causes.old_library(file, version, found)

    def _judge_symbols(self, closure: Closure) -> list[Finding | str]:
        """Look up every undefined symbol; returned sentences describe what remains unknown."""
        undefined = [one.name for one in self._unresolved(closure)]
        python = [name for name in undefined if _PYTHON_SYMBOL.fullmatch(name)]
        torch = [name for name in undefined if causes.is_torch_symbol(name)]
        known = {*python, *torch}
        others = [name for name in undefined if name not in known]
        found: list[Finding | str] = []
        if python and any(one.defines(_PYTHON_KNOWN) for one in self._interpreter()):
            found.append(causes.python_symbol(self.label, python, self.host.python))
        if torch and closure.unread:
            found.append(f"`{torch[0]}` may be in {closure.unread[0]}, which was not read")
        elif torch:
            found.append(self._describe_torch(torch))
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            found.append(f"nothing that {self.label} needs defines `{others[0]}`{more}")
        return found

    def _describe_torch(self, names: list[str]) -> Finding | str:
        torch = self.host.torch
        if torch.status == "absent":
            return causes.torch_absent(self.label, self.torch_min)
        if self.host.torch_folder is None:
            return f"`{names[0]}` is torch's, whose libraries were not found"
        cuda = next((name for name in names if causes.is_cuda_part(name)), "")
        if cuda and self._is_cpu_torch():
            return causes.cpu_torch(self.label, cuda, torch)
        return causes.torch_symbols(self.label, names, torch, self.torch_min)

    def _unresolved(self, closure: Closure) -> Iterator[Any]:
        """Yield the symbols that the library needs but nothing defines, except weak symbols."""
        own = [one.shared for one in closure.libraries.values()]
        others: list[SharedObject] = []
        for symbol in self.root.shared.undefined:
            if symbol.weak:
                continue
            named = closure.libraries.get(symbol.version.file) if symbol.version else None
            if named is not None and named.shared.defines(symbol.name):
                continue
            if any(one.defines(symbol.name) for one in own):
                continue
            others = others or [*self._interpreter(), *self._torch_libraries()]
            if not any(one.defines(symbol.name) for one in others):
                yield symbol

    def _interpreter(self) -> list[SharedObject]:
        """Return the interpreter and the libraries that are loaded with it, including libpython."""
        linker = self.host.linker
        shared = linker.open(linker.program) if linker.program is not None else None
        if shared is None:
            return []
        libraries = linker.close(Loaded(shared, linker.program)).libraries
        return [one.shared for one in libraries.values()]

    def _torch_libraries(self) -> list[SharedObject]:
        """Return torch's libraries: a module that is loaded after torch need not list them."""
        folder = self.host.torch_folder
        paths = sorted(folder.glob("lib*.so")) if folder is not None else []
        opened = (self.host.linker.open(path) for path in paths)
        return [shared for shared in opened if shared is not None]


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version))
