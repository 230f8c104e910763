"""Tests of pip and uv: every index, every GPU, offline, upgrades, removal."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from packaging.version import Version

from ci.install_tests.clients import Environment, call, runs_here, serve, without_network
from ci.install_tests.results import GPUS, MIXED, InstallError, Result, attempt
from flash_dist.toolkit.builds.published import load_picks, published_sets
from flash_dist.toolkit.indexes.index import PROJECT
from flash_dist.toolkit.make.project import ARCHSETS, ROOT
from flash_dist.toolkit.make.release.index import DEFAULT, write_files, write_index
from flash_dist.toolkit.make.release.pypi import make_plain, make_version, name_plain
from flash_dist.toolkit.make.wheels.artefacts import (
    Artefact,
    newest_first,
    read_artefact,
    require_sound,
)
from flash_dist.toolkit.targets.archs import DEFAULT_MACHINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from flash_dist.toolkit.targets.archs import ArchSet

DROPPED: Final = "py.typed"  # a file that the next version no longer has
MACHINES: Final = (*GPUS, *MIXED)
DRIVER: Final = "580"
OLDER_DRIVER: Final = "535"  # a driver that cannot load CUDA 13
# Upgrade steps: the index to install from, and the version (0: this version, 1: the next one).
UPGRADES: Final = (
    *(("labelled", number) for number in (0, 1, 0)),
    *(("plain", number) for number in (0, 1, 0)),
    ("labelled", 1),
    ("plain", 1),
    ("labelled", 0),
    ("plain", 1),
)
OLDER_MACHINES: Final = ("7.5", "7.5,9.0", "12.0")  # compute capabilities, with OLDER_DRIVER
NO_CODE: Final = 1  # exit status of select and doctor for a GPU without code


def make_next(one: Artefact, folder: Path) -> Artefact:
    """Write the wheel of the next version into a folder, without the file DROPPED."""
    version = next_version(one.version)
    files = tuple(name for name in one.manifest.files if name != DROPPED)
    manifest = replace(one.manifest, package_version=str(version), files=files)
    folder.mkdir(parents=True)
    path = folder / one.file_name.replace(f"-{one.version}-", f"-{version}-")
    path.write_bytes(make_version(one, manifest))
    require_sound(read_artefact(path))
    return read_artefact(path)


def next_version(version: Version) -> Version:
    """Return the next minor version: 0.2.0+cu130.all for 0.1.0+cu130.all."""
    numbers = f"{version.major}.{version.minor + 1}.0"
    return Version(f"{numbers}+{version.local}" if version.local else numbers)


class ClientTests:
    """The tests of one client."""

    def __init__(self, client: str, url: str, artefacts: Sequence[Artefact], work: Path) -> None:
        self.client = client
        self.url = url
        ordered = reversed(newest_first(artefacts))
        newest = {one.set_name: one for one in ordered}
        self.by_set = {name: one for name, one in newest.items() if runs_here(one)}
        self.foreign = {name: one for name, one in newest.items() if name not in self.by_set}
        self.pick = load_picks(ARCHSETS)[client].name
        self._work = work
        self._count = 0

    def results(self) -> Iterator[Result]:
        """Run all tests; a test that cannot run becomes a result, too."""
        names = [one.name for one in published_sets() if one.machine == DEFAULT_MACHINE]
        if self.pick in self.by_set:
            yield attempt(self.client, "default index", self.try_default)
            yield attempt(self.client, "wrong hash is refused", self.try_wrong_hash)
            yield attempt(self.client, "upgrades both ways, plain and labelled", self.try_upgrades)
        else:
            yield self._lack("default index", self.pick)
        for name in (*names, *(set(self.by_set) - set(names))):
            yield from self._set_results(name)
        if len(self.by_set) > 1:
            yield attempt(self.client, "one set to another, uninstall", self.try_switch)
        lacking = sorted(set(names) - set(self.by_set) - set(self.foreign))
        older = ((machine, OLDER_DRIVER) for machine in OLDER_MACHINES)
        for machine, driver in (*((machine, DRIVER) for machine in MACHINES), *older):
            what = f"select for {machine}, driver {driver}"
            if lacking:
                yield self._lack(what, ", ".join(lacking))
            else:
                yield attempt(self.client, what, partial(self.try_select, machine, driver))
        yield from self._foreign_results()

    def _foreign_results(self) -> Iterator[Result]:
        for archset in published_sets():
            if archset.machine != DEFAULT_MACHINE:
                what = f"{archset.name} for {archset.machine}"
                if archset.name in self.foreign:
                    yield attempt(self.client, what, partial(self.try_foreign, archset))
                else:
                    yield self._lack(what, archset.name)

    def _set_results(self, name: str) -> Iterator[Result]:
        if name not in self.by_set:
            yield self._lack(f"index {name}", name)
            return
        index, offline = partial(self.try_set, name), partial(self.try_offline, name)
        yield attempt(self.client, f"index {name}, with hashes", index)
        yield attempt(self.client, f"{name}: network off", offline)

    def _lack(self, what: str, name: str) -> Result:
        reason = f"no wheel of {name} in dist/"
        if name in self.foreign:
            reason = f"the wheel of {name} is not for this machine"
        return Result(self.client, what, "NOT RUN", reason)

    def _fresh(self, cache: Path | None = None) -> Environment:
        self._count += 1
        folder = self._work / f"{self.client}-{self._count}"
        return Environment(self.client, folder, f"{self.url}{DEFAULT}/", cache)

    def try_default(self) -> str:
        """Install without a version; expect the set that archsets.json names for this client."""
        environment = self._fresh()
        environment.install("flash-dist")
        return environment.require(self.by_set[self.pick].version)

    def try_set(self, name: str) -> str:
        """Install a set from the address of its index, with a required hash."""
        one, environment = self.by_set[name], self._fresh()
        pinned = self._pin(one, one.sha256)
        environment.install("--require-hashes", "-r", pinned, index=f"{self.url}{name}/")
        return environment.require(one.version)

    def try_wrong_hash(self) -> str:
        """Install with a wrong hash: expect a refusal."""
        environment, pinned = self._fresh(), self._pin(self.by_set[self.pick], "0" * 64)
        try:
            environment.install("--require-hashes", "-r", pinned)
        except InstallError as error:
            if "hash" in str(error).lower() and not environment.leftovers():
                return ""
            raise
        message = "a wheel whose hash is another was installed"
        raise InstallError(message)

    def _pin(self, one: Artefact, sha256: str) -> str:
        path = self._work / f"{self.client}-{self._count}.txt"
        path.write_text(f"flash_dist=={one.version} --hash=sha256:{sha256}\n", encoding="utf-8")
        return str(path)

    def try_offline(self, name: str) -> str:
        """Download with pip, then install without index and network."""
        off, one, environment = without_network(), self.by_set[name], self._fresh()
        folder = environment.folder / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        call([*command, "--dest", str(folder), "--index-url", f"{self.url}{name}/", "flash-dist"])
        words = ("--no-index", "--find-links", str(folder), "flash-dist")
        environment.install(*words, within=off)
        (folder / one.file_name).unlink()
        return environment.require(one.version)

    def try_upgrades(self) -> str:
        """Upgrade to the next version, which lacks one file, and go back, with one cache.

        After each step no file of the other version may be left, `verify` and `doctor` must pass,
        and the installed version must read the record that the previous version saved.
        """
        work = self._work / f"{self.client}-upgrades"
        two = [one := self.by_set[self.pick], make_next(one, work / "next")]
        plain = {name_plain(each): make_plain(each) for each in two}
        write_index(work / "labelled", two, "http://127.0.0.1/", partial=True)
        write_files(work / "plain", plain)
        environment, record = self._fresh(work / "cache"), work / "record.json"
        passed: list[Version] = []
        with serve(work) as url:
            for index, number in UPGRADES:
                each = two[number]
                address, wheel, version = f"{url}labelled/{DEFAULT}/", each.path, each.version
                if index == "plain":
                    address, version = f"{url}plain/", Version(version.public)
                    wheel = work / "plain" / PROJECT / name_plain(each)
                environment.install(*_words_for(version, passed), index=address)
                environment.require(version)
                environment.require_sound(wheel, record)
                passed.append(version)
        return " -> ".join(map(str, passed))

    def try_switch(self) -> str:
        """Install each set over the previous one, and uninstall the last."""
        environment, passed = self._fresh(), []
        for name, one in self.by_set.items():
            environment.install(f"flash_dist=={one.version}", index=f"{self.url}{name}/")
            passed.append(environment.require(one.version).partition("+")[2])
        environment.uninstall()
        if environment.leftovers():
            message = f"uninstall leaves {[str(path) for path in environment.leftovers()]}"
            raise InstallError(message)
        return " -> ".join([*passed, "nothing"])

    def try_select(self, machine: str, driver: str) -> str:
        """Run the install command that select prints; doctor must agree with select on each GPU."""
        words = ["-m", "flash_dist", "select", "--gpu", machine, "--driver", driver]
        said = _read(_ask_here(*words, "--index", self.url, "--json"))
        if said["chosen"] is None:
            return self._try_refused(machine, driver, said)
        environment, chosen = self._fresh(), said["chosen"]
        line = next(one["line"] for one in said["commands"] if one["tool"] == self.client)
        environment.install(*shlex.split(line.partition(" install ")[2]))
        version = environment.require(self.by_set[chosen["name"]].version)
        expected = {one["compute_capability"]: one["how"] for one in chosen["gpus"]}
        _require_same(expected, _ask_doctor(environment, machine, driver))
        how = ", ".join(f"{gpu} {how}" for gpu, how in expected.items())
        return f"{version.partition('+')[2]}: {how}"

    def try_foreign(self, archset: ArchSet) -> str:
        """Check the wheels for another kind of CPU.

        The client must download the pick for that CPU, and select must name a wheel for it.
        """
        machine, gpu = archset.machine, str(archset.archs[-1].device)
        pick = self.foreign[load_picks(ARCHSETS, machine)[self.client].name].file_name
        found = self._download(machine)
        if found != pick:
            message = f"{found} comes on {machine}, expected {pick}"
            raise InstallError(message)
        words = ["-m", "flash_dist", "select", "--gpu", gpu, "--machine", machine]
        chosen = _read(_ask_here(*words, "--index", self.url, "--json"))["chosen"]["name"]
        if chosen not in self.foreign:
            message = f"select chooses {chosen} for {gpu} on {machine}"
            raise InstallError(message)
        return f"{found}; select for {gpu}: {chosen}"

    def _download(self, machine: str) -> str:
        """Return the file that the client downloads from the default index for another CPU."""
        folder = self._work / f"{self.client}-{machine}"
        index = dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), f"{self.url}{DEFAULT}/")
        if self.client == "pip":
            tags = {tag.rpartition("-")[2] for one in self.foreign.values() for tag in one.tags}
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", str(folder)]
            call([*command, *(f"--platform={tag}" for tag in sorted(tags)), "flash-dist"], index)
            return next(folder.glob("*.whl")).name
        command = ["uv", "pip", "install", "--quiet", "--no-cache", "--no-deps"]
        command += [f"--python-platform={machine}-manylinux_2_40", "--target", str(folder)]
        call([*command, "--python", sys.executable, "flash-dist"], index)
        every = (*self.foreign.values(), *self.by_set.values())
        names = {f"flash_dist-{one.version}.dist-info": one.file_name for one in every}
        return names[next(folder.glob("*.dist-info")).name]

    def _try_refused(self, machine: str, driver: str, said: dict[str, Any]) -> str:
        """Check that doctor refuses every set for the reasons that select gave."""
        for candidate in said["candidates"]:
            one, environment = self.by_set[candidate["name"]], self._fresh()
            environment.install(f"flash_dist=={one.version}", index=f"{self.url}{one.set_name}/")
            expected = {one["compute_capability"]: one["how"] for one in candidate["gpus"]}
            _require_same(expected, _ask_doctor(environment, machine, driver))
        return "no set: doctor refuses all of them"


def _words_for(version: Version, passed: Sequence[Version]) -> list[str]:
    """Return the install arguments that replace the last version by `version`."""
    if passed and version.local == passed[-1].local and version > passed[-1]:
        return ["--upgrade", PROJECT]
    # pip keeps a labelled version if the same version without a label is requested.
    again = passed and version.public == passed[-1].public
    return [*(["--force-reinstall"] if again else []), f"{PROJECT}=={version}"]


def _read(output: str) -> dict[str, Any]:
    return dict(json.loads(output))


def _ask_here(*words: str) -> str:
    return call([sys.executable, *words], {"PYTHONPATH": str(ROOT)}, fine=(0, NO_CODE))


def _ask_doctor(environment: Environment, machine: str, driver: str) -> dict[str, str]:
    """Return doctor's verdict on each GPU for an installed wheel."""
    words = ["-m", "flash_dist", "doctor", "--gpu", machine, "--driver", driver]
    output = environment.run(*words, "--only", "build,driver,gpu", "--json", fine=(0, NO_CODE))
    data = [check["data"] for check in _read(output)["checks"] if check["gpu"] is not None]
    return {str(one["compute_capability"]): str(one["how"]) for one in data}


def _require_same(expected: dict[str, str], found: dict[str, str]) -> None:
    if found != expected:
        message = f"select says {expected}, doctor of the installed wheel says {found}"
        raise InstallError(message)
