"""Install the wheels of dist/ as conda packages: the part of `nox -s install_test` for conda.

rattler's solver and installer get a description of the machine, so no GPU is needed. Dependencies
of flash-dist are stubs; see `ci/install_tests/conda_stubs.py`.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from ci.install_tests.client import make_next
from ci.install_tests.clients import call_openly, find_files
from ci.install_tests.conda_client import RefusedError, Request, Solved, ask
from ci.install_tests.results import GPUS, MIXED, InstallError, Result, attempt
from flash_dist.errors import FlashDistError
from flash_dist.toolkit.builds.conda_solver import SUBDIRS, is_served, oldest_cuda
from flash_dist.toolkit.builds.published import load_picks
from flash_dist.toolkit.indexes.index import PROJECT
from flash_dist.toolkit.make.conda.check import recipe_of
from flash_dist.toolkit.make.conda.recipe import PICK, Recipe
from flash_dist.toolkit.make.project import ARCHSETS, load_project
from flash_dist.toolkit.make.wheels.artefacts import Artefact, newest_first
from flash_dist.toolkit.targets.devices import Device, first_driver, parse_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

CUDA: Final = "13.0"
OLDER_CUDA: Final = "12.4"
FAILED: Final = 1  # doctor's exit status for a failed check
_NEEDED: Final = ("rattler", "rattler_build")
MACHINE: Final = {"__glibc": "2.36", "__linux": "6.1", "__unix": "0"}


def results(artefacts: Sequence[Artefact], work: Path) -> Iterator[Result]:
    """Make a channel of the newest wheels in an empty folder and run all tests.

    A test that cannot run is one of the results, too.
    """
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        yield Result(PICK, "everything", "NOT RUN", f"not installed: {', '.join(lacking)}")
        return
    newest = newest_first(artefacts)
    newest = [one for one in newest if one.version.public == newest[0].version.public]
    try:
        members, stubs = _write_channels(newest, work)
    except (FlashDistError, OSError) as error:
        yield Result(PICK, "channel", "FAIL", str(error))
        return
    detail = f"NOTE: stubs made for this test: {', '.join(stubs)}"
    yield Result(PICK, f"channel of {len(newest)} packages", "ok", detail)
    for subdir in sorted({recipe.subdir for recipe in members.values()}):
        own = {one: recipe for one, recipe in members.items() if recipe.subdir == subdir}
        yield from CondaTests(own, subdir, work).results()


def _write_channels(
    artefacts: Sequence[Artefact], work: Path
) -> tuple[dict[Artefact, Recipe], list[str]]:
    # NOTE: imported here, so that a missing package becomes a result
    from ci.install_tests.conda_stubs import write_stubs  # noqa: PLC0415
    from flash_dist.toolkit.make.conda.pack import write_channel  # noqa: PLC0415

    write_channel(work / "conda", artefacts, epoch=load_project().epoch)
    members = {one: recipe_of(one) for one in artefacts}
    return members, write_stubs(work / "stubs", members.values())


class CondaTests:
    """Tests of the packages of one platform."""

    def __init__(self, members: dict[Artefact, Recipe], subdir: str, work: Path) -> None:
        self.members = members
        self.subdir = subdir
        machine = next(name for name, one in SUBDIRS.items() if one == subdir)
        self.pick = load_picks(ARCHSETS, machine)[PICK].name
        self._work = work
        self._numbers = count(1)

    def results(self) -> Iterator[Result]:
        """Run all tests."""
        if self.pick not in {one.set_name for one in self.members}:
            yield Result(
                PICK, f"{self.subdir}: no choice gives {self.pick}", "NOT RUN", "not in dist/"
            )
        for gpus in (*GPUS, *MIXED):
            yield self._try(f"no choice, {gpus}", partial(self.try_pick, gpus))
        yield self._try("no choice, GPU unknown", partial(self.try_pick, ""))
        older = partial(self.try_pick, next(iter(GPUS)), OLDER_CUDA, "__cuda >=")
        yield self._try(f"no choice, CUDA {OLDER_CUDA}", older)
        yield self._try("without CUDA refused", self.try_without_cuda)
        for one in self.members:
            yield self._try(f"{one.set_name} by build string", partial(self.try_set, one))
        yield self._try("upgrades both ways", self.try_upgrades)
        if len(self.members) > 1:
            yield self._try("one set to another, uninstall", self.try_switch)

    def _try(self, what: str, action: Callable[[], str]) -> Result:
        here = self.subdir == SUBDIRS.get(platform.machine())
        what = what if here else f"{self.subdir}: {what}"
        try:
            return attempt(PICK, what, action)
        except subprocess.TimeoutExpired as error:
            return Result(PICK, what, "FAIL", str(error))

    def try_pick(self, gpus: str, cuda: str = CUDA, lacking: str = "__cuda_arch") -> str:
        """Install for some GPUs without naming a set; doctor must accept the result.

        If no set fits, the refusal must name what is lacking.
        """
        lowest = str(min(map(Device.parse, gpus.split(",")))) if gpus else ""
        expected = self._expect(lowest, cuda)
        if expected is None:
            return self._require_refusal([PROJECT], lowest, cuda, lacking)
        prefix, found = self._install([PROJECT], lowest, cuda)
        self._require(found, expected)
        how = self._require_served(prefix, gpus or self._every_gpu(), cuda)
        return f"{expected.set_name}: {how}"

    def try_without_cuda(self) -> str:
        """Install on a machine without a driver: the refusal must name the missing package."""
        return self._require_refusal([PROJECT], "", "", "__cuda >=")

    def try_set(self, one: Artefact) -> str:
        """Request one set on every GPU; the solver must refuse it exactly for GPUs without code."""
        cuda = max(CUDA, oldest_cuda(one.manifest), key=parse_version)
        fitting = [gpu for gpu in GPUS if is_served(one.embedded, Device.parse(gpu))]
        for gpu in GPUS:
            if gpu in fitting:
                self._require(self._solve(self._spec(one), gpu, cuda), one)
            else:
                self._require_refusal(self._spec(one), gpu, cuda, "__cuda_arch")
        prefix, found = self._install(self._spec(one), fitting[0], cuda)
        self._require(found, one)
        how = self._require_served(prefix, ",".join(fitting), cuda)
        _require_recorded(prefix)
        refused = [gpu for gpu in GPUS if gpu not in fitting]
        return f"{how}; {len(fitting)} GPUs, refused on {', '.join(refused) or 'none'}"

    def try_switch(self) -> str:
        """Install one set over another in the same prefix, and uninstall it."""
        prefix, passed = self._fresh(), []
        for one in list(self.members)[:2]:
            gpu = next(gpu for gpu in GPUS if is_served(one.embedded, Device.parse(gpu)))
            self._require(self._request(self._spec(one), gpu, CUDA, prefix), one)
            _require_recorded(prefix)
            passed.append(one.set_name)
        self._request(["python"], "", CUDA, prefix)
        left = [path for path in find_files(prefix) if "flash_dist_stubs" not in path.parts]
        if left:
            message = f"uninstall leaves {', '.join(map(str, left))}"
            raise InstallError(message)
        return " -> ".join([*passed, "nothing"])

    def try_upgrades(self) -> str:
        """Upgrade to the next version, which lacks one file, and back, with one package cache."""
        from flash_dist.toolkit.make.conda.pack import write_channel  # noqa: PLC0415 - may be absent

        one, prefix, passed = next(iter(self.members)), self._fresh(), []
        channel, after = f"two-{self.subdir}", make_next(one, self._work / f"next-{self.subdir}")
        gpu = next(gpu for gpu in GPUS if is_served(one.embedded, Device.parse(gpu)))
        write_channel(self._work / channel, [one, after], epoch=load_project().epoch)
        for each in (one, after, one, after):
            recipe = recipe_of(each)
            specs = [PROJECT if each is after else f"{PROJECT}={recipe.version}"]
            self._request(specs, gpu, CUDA, prefix, channel)
            _require_recorded(prefix)
            _run_program(prefix, "verify", str(self._work / channel / recipe.path))
            passed.append(_require_only(prefix, each))
        return " -> ".join(passed)

    def _expect(self, gpu: str, cuda: str) -> Artefact | None:
        """Return the wheel that the solver should choose; None if no wheel fits the machine."""
        fitting = [
            one
            for one in self.members
            if parse_version(cuda) >= parse_version(oldest_cuda(one.manifest))
            and (not gpu or is_served(one.embedded, Device.parse(gpu)))
        ]
        picks = [one for one in fitting if one.set_name == self.pick]
        fitting.sort(key=lambda one: self.members[one].build_number, reverse=True)
        return next(iter((*picks, *fitting)), None)

    def _every_gpu(self) -> str:
        """Return the GPUs that at least one set serves, to ask doctor about."""
        served = {arch for one in self.members for arch in one.embedded}
        return ",".join(gpu for gpu in GPUS if is_served(served, Device.parse(gpu)))

    def _spec(self, one: Artefact) -> list[str]:
        recipe = self.members[one]
        return [f"{PROJECT}={recipe.version}={recipe.build}"]

    def _fresh(self) -> Path:
        return self._work / f"prefix-{self.subdir}-{next(self._numbers)}"

    def _install(self, specs: list[str], gpu: str, cuda: str) -> tuple[Path, Solved]:
        prefix = self._fresh()
        return prefix, self._request(specs, gpu, cuda, prefix)[PROJECT]

    def _solve(self, specs: list[str], gpu: str, cuda: str) -> Solved:
        return self._request(specs, gpu, cuda, None)[PROJECT]

    def _request(
        self, specs: list[str], gpu: str, cuda: str, prefix: Path | None, channel: str = "conda"
    ) -> dict[str, Solved]:
        gpu_words = {"__cuda": cuda, "__cuda_arch": gpu}
        virtual = MACHINE | {name: value for name, value in gpu_words.items() if value}
        channels = [(self._work / name).as_uri() for name in (channel, "stubs")]
        cache = str(self._work / "cache")
        return ask(
            Request(channels, specs, self.subdir, virtual, str(prefix) if prefix else "", cache)
        )

    def _require(self, found: Solved | dict[str, Solved], one: Artefact) -> None:
        solved = found if isinstance(found, Solved) else found[PROJECT]
        if solved.build != self.members[one].build:
            message = f"the solver chose {solved.build}, expected {self.members[one].build}"
            raise InstallError(message)

    def _require_refusal(self, specs: list[str], gpu: str, cuda: str, word: str) -> str:
        try:
            solved = self._solve(specs, gpu, cuda)
        except RefusedError as error:
            if word in error.message:
                return next(line for line in error.message.splitlines() if word in line).strip(
                    " └─├│"
                )
            message = f"the refusal does not name {word}: {error.message}"
            raise InstallError(message) from error
        message = f"{solved.build} was chosen for {gpu or 'no GPU'}, which it does not serve"
        raise InstallError(message)

    def _require_served(self, prefix: Path, gpus: str, cuda: str) -> str:
        """Ask the installed doctor about some GPUs; return how the installed code serves them."""
        driver = str(first_driver(parse_version(cuda)))
        words = ["--gpu", gpus, "--driver", driver, "--only", "build,driver,gpu"]
        checks = _ask_doctor(prefix, *words)
        how = sorted({str(check["data"]["how"]) for check in checks if check["data"].get("how")})
        return ", ".join(how)


def _require_recorded(prefix: Path) -> None:
    """Ask doctor whether all files match RECORD."""
    _ask_doctor(prefix, "--only", "install")


def _require_only(prefix: Path, one: Artefact) -> str:
    """Check that the prefix has this version, and only files that conda recorded for it."""
    said = _run_program(prefix, "--version").split()[-1]
    (record,) = (prefix / "conda-meta").glob(f"{PROJECT}-*.json")
    listed = {*json.loads(record.read_text("utf-8"))["files"], str(record.relative_to(prefix))}
    found = {str(path.relative_to(prefix)) for path in find_files(prefix)}
    strangers = sorted(path for path in found - listed if "flash_dist_stubs" not in path)
    if said != str(one.version) or strangers:
        message = f"{said} is installed, expected {one.version}; not of it: {strangers or 'none'}"
        raise InstallError(message)
    return said


def _run_program(prefix: Path, *words: str, fine: Sequence[int] = (0,)) -> str:
    """Run the installed program, without this machine's settings."""
    return call_openly([str(prefix / "bin/python"), "-m", "flash_dist", *words], {}, fine=fine)


def _ask_doctor(prefix: Path, *words: str) -> list[dict[str, Any]]:
    output = _run_program(prefix, "doctor", *words, "--json", fine=(0, FAILED))
    checks: list[dict[str, Any]] = json.loads(output)["checks"]
    bad = [check for check in checks if check["status"] not in {"ok", "info"}]
    if bad:
        said = "; ".join(f"{check['name']}: {check['summary']}" for check in bad)
        message = f"doctor {' '.join(words)} says {said}"
        raise InstallError(message)
    return checks


if __name__ == "__main__":
    sys.exit("`nox -s install_test` runs this")
