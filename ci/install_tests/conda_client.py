"""A conda client for `nox -s install_test`: rattler's solver and installer in a process.

The process reads a request as JSON from stdin. It writes JSON to stdout: the packages, or the
reason why there are none.

NOTE: the process skips Python's normal exit, in which py-rattler 0.28 crashes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flash_dist.errors import FlashDistError
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

TIMEOUT_S = 300


class RefusedError(FlashDistError):
    """Raised if the solver finds no packages."""


class ClientError(FlashDistError):
    """Raised if the client itself fails."""


@dataclass(frozen=True)
class Request:
    """The requirements to solve, and the prefix to install into."""

    channels: list[str]
    specs: list[str]
    platform: str
    virtual: dict[str, str]  # virtual packages, which describe a machine
    prefix: str = ""  # empty: solve only
    cache: str = ""


@dataclass(frozen=True)
class Solved:
    """A package that the solver chose."""

    name: str
    version: str
    build: str


def ask(request: Request) -> dict[str, Solved]:
    """Solve the request. If it has a prefix, delete the contents of the prefix and install.

    Raises:
        RefusedError: There is no solution.
        ClientError: Any other failure.
    """
    done = subprocess.run(
        [sys.executable, "-m", "ci.install_tests.conda_client"],
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
        check=False,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        message = f"the conda client failed ({done.returncode}): {done.stderr.strip()[-300:]}"
        raise ClientError(message) from error
    if "refused" in answer:
        raise RefusedError(str(answer["refused"]))
    return {one["name"]: Solved(**one) for one in answer["packages"]}


async def _solve(request: Request) -> list[Solved]:
    # NOTE: imported here, so that callers need no rattler
    from rattler import (  # noqa: PLC0415
        BuildString,
        Channel,
        GenericVirtualPackage,
        MatchSpec,
        PackageName,
        Version,
        install,
        solve,
    )
    from rattler.platform import Subdir  # noqa: PLC0415

    records = await solve(
        [Channel(url) for url in request.channels],
        [MatchSpec(spec, strict=False) for spec in request.specs],  # specs as users write them
        platforms=[Subdir(request.platform), Subdir("noarch")],
        virtual_packages=[
            GenericVirtualPackage(PackageName(name), Version(version), BuildString("0"))
            for name, version in request.virtual.items()
        ],
    )
    if request.prefix:
        await install(
            records,
            request.prefix,
            cache_dir=Path(request.cache),
            platform=Subdir(request.platform),
            show_progress=False,
        )
    return [Solved(one.name.normalized, str(one.version), str(one.build)) for one in records]


def _answer(text: str) -> dict[str, object]:
    from rattler.exceptions import SolverError  # noqa: PLC0415

    try:
        packages: Iterable[Solved] = asyncio.run(_solve(Request(**json.loads(text))))
    except SolverError as error:
        return {"refused": str(error)}
    return {"packages": [asdict(one) for one in packages]}


if __name__ == "__main__":
    print(json.dumps(_answer(sys.stdin.read())), flush=True)
    os._exit(0)
