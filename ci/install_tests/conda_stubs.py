"""Stubs of flash-dist's dependencies, so that `nox -s install_test` needs no real channel.

The stubs contain only `bin/python`, which starts another Python with the packages of the prefix.
They are never published.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from typing import TYPE_CHECKING, Final

from rattler_build import assemble_package

from flash_dist.toolkit.make.conda.repodata import write_repodata

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from flash_dist.toolkit.make.conda.recipe import Recipe

_STAND_IN: Final = """\
#!/bin/sh
prefix=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$prefix/lib/python{version}/site-packages" PYTHONDONTWRITEBYTECODE=1
exec {python} "$@"
"""


def write_stubs(
    channel: Path,
    recipes: Iterable[Recipe],
    python: str = sys.executable,
    running: str = platform.python_version(),
) -> list[str]:
    """Make a channel with a stub of every dependency.

    Args:
        channel: The folder.
        recipes: The packages whose dependencies need stubs.
        python: The Python that the stub starts.
        running: The version of that Python.

    Returns:
        `NAME VERSION` of each stub.
    """
    depends = {one for recipe in recipes for one in recipe.depends if not one.startswith("__")}
    versions = {name: _oldest(rest) for name, _, rest in (one.partition(" ") for one in depends)}
    versions["python"] = running
    for name, version in versions.items():
        _write_stub(channel, name, version, python)
    write_repodata(channel / "noarch")
    return [f"{name} {version}" for name, version in sorted(versions.items())]


def _oldest(versions: str) -> str:
    found = re.search(r">=\s*([0-9.]*[0-9])", versions) or re.search(r"([0-9.]*[0-9])", versions)
    return found[1] if found else "1.0"


def _write_stub(channel: Path, name: str, version: str, python: str) -> None:
    stage = channel.with_name(f"{channel.name}-{name}")
    note = stage / "share" / "flash_dist_stubs" / f"{name}.json"
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"stub": name}), encoding="utf-8")
    if name == "python":
        minor = version.rpartition(".")[0]
        for alias in ("python", "python3", f"python{minor}"):
            script = stage / "bin" / alias
            script.parent.mkdir(exist_ok=True)
            text = _STAND_IN.format(version=minor, python=shlex.quote(python))
            script.write_text(text, encoding="utf-8")
            script.chmod(0o755)
    assemble_package(
        name,
        version,
        "noarch",
        "stub_0",
        channel / "noarch",
        files_dir=stage,
        noarch="generic",
        detect_prefix=False,
        compression_level=1,
    )
