"""Locks the packages that sessions, workflows and images install: `nox -s lock_requirements`.

`<group>.txt` has every package that a group of the project's or the toolkit's pyproject.toml needs,
with its version and the hashes of its wheels for the Pythons and CPUs below. With
`--require-hashes`, an installer accepts only these packages with these bytes. If a version has no
wheel, the hash is that of its sources. The files of groups that build and publish are in `locks/`
next to this module, the files of the package's own sessions are in `ci/locks/`. The file of a group
that is locked for the first time is in `ci/locks/`.

No file has torch: local builds of it have other hashes and need other packages. torch is installed
after the group `beside_torch`, which has the packages that every build of torch needs.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import KernelsError
from .command import command
from .project import ROOT, TEMPORARY, load_groups, read_pyproject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

LOCKS: Final = ROOT / "ci" / "locks"
OWN_LOCKS: Final = Path(__file__).resolve().with_name("locks")
UNLOCKED, BESIDE = "torch", "beside_torch"  # names of dependency groups
MACHINES: Final = ("x86_64", "aarch64")
OLDEST, NEWEST = (3, 10), (3, 14)  # Pythons whose wheels have hashes
NOT_COVERED: Final = (
    f"hashes are locked for Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} on Linux, "
    f"{' or '.join(MACHINES)}"
)
RENEW: Final = "`nox -s lock_requirements` locks all groups again"
INDEX: Final = "https://pypi.org/simple"
# Groups whose oldest Python is not 3.10.
PYTHONS: Final = {"audit": "3.11", "container": "3.11", "workflows": "3.11", "image_oldest": "3.9"}
# Groups for a separate folder or machine: their versions need not agree with other groups.
ALONE: Final = ("image_oldest", "nvcc", "nvcc_aarch64", "nvcc12", "ptxas12")
_MARK: Final = "#: "  # prefix of the lines of a lock file that list its group's requirements


class LockError(KernelsError):
    """A group has changed since it was locked, or cannot be locked."""


def is_covered(python: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Tell if the hashes cover this machine and its Python."""
    known = sys.platform == "linux" and platform.machine() in MACHINES
    return known and OLDEST <= python <= NEWEST


def lock_path(group: str) -> Path:
    """Return the path of a group's lock file."""
    own = OWN_LOCKS / f"{group}.txt"
    return own if own.is_file() else LOCKS / own.name


def locked(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return an installer's arguments that install groups from their lock files, by hash.

    Raises:
        LockError: A group has changed since it was locked.
    """
    for name, wanted in groups.items():
        path = lock_path(name)
        found = list(_read_requirements(path.read_text("utf-8"))) if path.is_file() else []
        if sorted(found) != sorted(wanted):
            new = ", ".join(f"`{one}`" for one in sorted({*wanted} - {*found}))
            what = f"{new} is not in" if new else "it needs less than"
            message = f"group `{name}` of pyproject.toml is not locked: {what} {_show(path)}"
            raise LockError(message, hint=RENEW)
    files = [word for name in groups for word in ("--requirement", str(lock_path(name)))]
    return ["--require-hashes", *files]


def constraints(*groups: str) -> str:
    """Return UV_CONSTRAINT: the lock files of groups whose packages uv installs for a build.

    It is empty where the hashes do not cover this machine or its Python. uv checks the hashes of
    constraints for all packages that it installs; pip checks none of them.
    """
    return " ".join(str(lock_path(name)) for name in groups) if is_covered() else ""


def _show(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def _read_requirements(text: str) -> Iterator[str]:
    lines = (line for line in text.splitlines() if line.startswith(_MARK))
    return (line.removeprefix(_MARK) for line in lines)


def flatten(groups: Mapping[str, Sequence[str | Mapping[str, str]]], name: str) -> list[str]:
    """Return the requirements of a group and of the groups that it includes, each once."""
    parts = (
        [one] if isinstance(one, str) else flatten(groups, one["include-group"])
        for one in groups[name]
    )
    return list(dict.fromkeys(one for part in parts for one in part))


def compile_locks(groups: Mapping[str, Sequence[str | Mapping[str, str]]]) -> dict[str, str]:
    """Return the text of each group's lock file, with the newest versions that groups can share.

    Raises:
        LockError: uv is not installed, or there is no solution.
    """
    wanted = {name: flatten(groups, name) for name in groups}
    found = {}
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        shared, made = (Path(folder) / name for name in ("pylock.shared.toml", "pylock.toml"))
        versions = _compile(_mark_newer(wanted), shared).keys()
        for name in sorted(wanted.keys() - {UNLOCKED}):
            made.unlink(missing_ok=True)
            if name not in ALONE:
                shutil.copyfile(shared, made)
            packages = _compile(wanted[name], made, PYTHONS.get(name, "3.10"))
            other = [] if name in ALONE else sorted(packages.keys() - versions)
            if other:
                message = f"group `{name}` needs {other}, which the other groups do not allow"
                raise LockError(message)
            head = [f"# Written by `nox -s lock_requirements` of the group `{name}`."]
            head += [f"{_MARK}{one}" for one in wanted[name]]
            found[name] = "\n".join([*head, *map(_write_package, packages.values())]) + "\n"
    return found


def _mark_newer(wanted: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the requirements that share versions; markers limit those that need a newer Python."""
    for name, requirements in wanted.items():
        for one in () if name in ALONE else requirements:
            newer = f"python_version >= '{PYTHONS[name]}'" if name in PYTHONS else ""
            yield f"{one}; {newer}" if newer and ";" not in one else one


def _compile(
    wanted: Iterable[str], made: Path, python: str = "3.10"
) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Resolve requirements on PyPI with uv; keep the versions in the file `made` if possible.

    Returns:
        Each package, by name and version.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--universal", "--quiet"]
    command += ["--no-header", "--no-annotate", "--no-config", "--no-python-downloads"]
    command += ["--default-index", INDEX, "--python-version", python]
    done = subprocess.run(
        [*command, "--output-file", str(made), "-"],
        input="\n".join(wanted),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        message = f"the groups of pyproject.toml cannot be locked:\n{done.stderr.strip()}"
        raise LockError(message)
    return {(one["name"], one["version"]): one for one in read_pyproject(made)["packages"]}


def _write_package(package: Mapping[str, Any]) -> str:
    """Return a package and its hashes as an entry of a requirements file."""
    marker = f" ; {package['marker']}" if "marker" in package else ""
    wheels = [one for one in package.get("wheels", ()) if _is_ours(one["url"].rpartition("/")[2])]
    files = wheels or [package["sdist"]]
    hashes = sorted(one["hashes"]["sha256"] for one in files)
    lines = [f"{package['name']}=={package['version']}{marker}"]
    return " \\\n".join([*lines, *(f"    --hash=sha256:{one}" for one in hashes)])


def _is_ours(wheel: str) -> bool:
    """Tell if a supported Python on a supported CPU can install a wheel of this name."""
    from packaging.utils import parse_wheel_filename  # noqa: PLC0415 - absent in a container

    tags = parse_wheel_filename(wheel.replace("%2B", "+"))[3]
    pythons = range(OLDEST[1], NEWEST[1] + 1)
    exact = {(f"cp3{minor}", abi) for minor in pythons for abi in (f"cp3{minor}", "none")}
    older = {(f"cp3{minor}", "abi3") for minor in range(2, NEWEST[1] + 1)}
    return any(
        (tag.interpreter.startswith("py") or (tag.interpreter, tag.abi) in exact | older)
        and (tag.platform == "any" or tag.platform.startswith(("manylinux", "linux")))
        and (tag.platform == "any" or tag.platform.endswith(MACHINES))
        for tag in tags
    )


@command
def main() -> int:
    """Run the command and return its exit status."""
    found = compile_locks(load_groups())
    texts = {lock_path(name): text for name, text in found.items()}
    for folder in (LOCKS, OWN_LOCKS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"{_show(path)}: {text.count('--hash=')} hashes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
