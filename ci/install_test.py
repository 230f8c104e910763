"""Install the wheels of dist/ as users do, from an index on this machine: `nox -s install_test`.

Every cell installs into a fresh environment with pip or uv, from a server of files and from nowhere
else, and looks at what came out. The clients' picks are those of `flash_dist/archsets.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci.artefacts import Artefact, find_artefacts, newest_first
from ci.index import DEFAULT, write_index
from ci.install_conda import conda_cells
from ci.project import ARCHSETS, ROOT
from flash_dist.archs import DEFAULT_MACHINE
from flash_dist.errors import FlashDistError
from flash_dist.published import load_picks, published_sets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flash_dist.archs import ArchSet

CLIENTS: Final = ("pip", "uv")
MACHINES: Final = (
    "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "7.5,8.6", "7.5,9.0", "9.0,12.0",
)  # fmt: skip
DRIVER: Final = "580"
_SAID: Final = 300  # characters of what a failed command says


class InstallError(FlashDistError):
    """An install came out otherwise than it must."""


@dataclass(frozen=True)
class Cell:
    """One thing that was tried."""

    client: str
    what: str
    outcome: str  # ok, FAIL, NOT RUN
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.client:<5} {self.what:<40} {self.outcome:<8} {self.detail}".rstrip()


class Environment:
    """A fresh virtual environment, and the client that installs into it."""

    def __init__(self, client: str, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self.python = folder / "bin" / "python"
        _call(["uv", "venv", "--quiet", "--python", sys.executable, str(folder)])

    def install(self, *words: str, index: str = "") -> None:
        """Install, without what flash_dist depends on: torch is not what is tested.

        Args:
            words: What, and options that pip and uv share.
            index: The only index; that which stands in for PyPI when empty.
        """
        named = {"pip": "--index-url", "uv": "--default-index"}[self.client]
        if self.client == "pip":
            command = [sys.executable, "-m", "pip", "--python", str(self.python), "install"]
            command += ["--quiet", "--no-cache-dir", "--no-deps"]
        else:
            command = ["uv", "pip", "install", "--python", str(self.python)]
            command += ["--quiet", "--no-cache", "--no-deps"]
        _call([*command, *words, *([named, index] if index else [])])

    def uninstall(self) -> None:
        """Remove the package again."""
        if self.client == "pip":
            command = [sys.executable, "-m", "pip", "--python", str(self.python)]
            _call([*command, "uninstall", "--quiet", "--yes", "flash_dist"])
        else:
            _call(["uv", "pip", "uninstall", "--quiet", "--python", str(self.python), "flash_dist"])

    def version(self) -> str:
        """Return the version that imports."""
        return self.run("-c", "import flash_dist; print(flash_dist.__version__)").strip()

    def run(self, *words: str) -> str:
        """Run Python; what flash_dist's tools need comes from the Python that runs this."""
        place = next(path for path in sys.path if path.endswith("site-packages"))
        return _call([str(self.python), *words], PYTHONPATH=place, PYTHONDONTWRITEBYTECODE="1")

    def leftovers(self) -> list[str]:
        """Return what is left of the package."""
        return sorted(str(path) for path in self.folder.rglob("*flash_dist*"))


def _call(command: Sequence[str], **variables: str) -> str:
    """Run a command that knows nothing of this machine's indexes, and return what it prints."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "PYTHON"))}
    closed = {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_OFFLINE": "0"}
    closed |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if _Served.url:  # in place of PyPI
        closed |= {"PIP_INDEX_URL": _Served.url, "UV_DEFAULT_INDEX": _Served.url}
    done = subprocess.run(
        command,
        env={**kept, **closed, **variables},
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:_SAID]
        message = f"`{shlex.join(command[:6])} ...` ended with {done.returncode}: {said}"
        raise InstallError(message)
    return done.stdout


class _Served(SimpleHTTPRequestHandler):
    url = ""  # of the default index

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder as `python -m http.server` does."""
    handler = partial(_Served, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        _Served.url = f"{url}{DEFAULT}/"
        try:
            yield url
        finally:
            server.shutdown()
            thread.join()


class Trial:
    """Everything that one client is tried with."""

    def __init__(self, client: str, url: str, artefacts: Sequence[Artefact], work: Path) -> None:
        self.client = client
        self.url = url
        newest = {one.set_name: one for one in reversed(newest_first(artefacts))}
        self.by_set = {k: v for k, v in newest.items() if _machine(v) == DEFAULT_MACHINE}
        self.foreign = {k: v for k, v in newest.items() if k not in self.by_set}
        self.pick = load_picks(ARCHSETS)[client].name
        self._work = work
        self._count = 0

    def cells(self) -> Iterator[Cell]:
        """Try everything; what cannot be tried is a cell, too."""
        names = [one.name for one in published_sets() if one.machine == DEFAULT_MACHINE]
        if self.pick in self.by_set:
            yield self._try("default index", self.try_default)
            yield self._try("wrong hash is refused", self.try_wrong_hash)
        else:
            yield self._lack("default index", self.pick)
        for name in (*names, *(set(self.by_set) - set(names))):
            if name not in self.by_set:
                yield self._lack(f"index {name}", name)
                continue
            yield self._try(f"index {name}, with hashes", partial(self.try_set, name))
            yield self._try(f"{name}: download, then offline", partial(self.try_offline, name))
        if len(self.by_set) > 1:
            yield self._try("one set to another, uninstall", self.try_switch)
        lacking = sorted(set(names) - set(self.by_set))
        for machine in MACHINES:
            what = f"select for {machine}, doctor agrees"
            if lacking:
                yield self._lack(what, ", ".join(lacking))
            else:
                yield self._try(what, partial(self.try_select, machine))
        for one in published_sets():
            if one.machine != DEFAULT_MACHINE:
                what = f"{one.name} for {one.machine}"
                known = one.name in self.foreign
                action = partial(self.try_foreign, one)
                yield self._try(what, action) if known else self._lack(what, one.name)

    def _lack(self, what: str, name: str) -> Cell:
        return Cell(self.client, what, "NOT RUN", f"no wheel of {name} in dist/")

    def _try(self, what: str, action: Callable[[], str]) -> Cell:
        try:
            return Cell(self.client, what, "ok", action())
        except (FlashDistError, OSError) as error:
            return Cell(self.client, what, "FAIL", str(error))

    def _fresh(self) -> Environment:
        self._count += 1
        return Environment(self.client, self._work / f"{self.client}-{self._count}")

    def try_default(self) -> str:
        """Ask for no version: the pick of the table comes."""
        environment = self._fresh()
        environment.install("flash-dist", index=f"{self.url}{DEFAULT}/")
        return _require(environment, self.by_set[self.pick])

    def try_set(self, name: str) -> str:
        """Ask for a set by the address of its index, and insist on the hash."""
        one, environment = self.by_set[name], self._fresh()
        pinned = self._pin(one, one.sha256)
        environment.install("--require-hashes", "-r", pinned, index=f"{self.url}{name}/")
        return _require(environment, one)

    def try_wrong_hash(self) -> str:
        """Ask for a file that is not there: nothing may be installed."""
        environment, pinned = self._fresh(), self._pin(self.by_set[self.pick], "0" * 64)
        try:
            environment.install("--require-hashes", "-r", pinned, index=_Served.url)
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
        """Download with pip, then install with no index at all."""
        one, environment = self.by_set[name], self._fresh()
        folder = environment.folder / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        _call([*command, "--dest", str(folder), "--index-url", f"{self.url}{name}/", "flash-dist"])
        environment.install("--no-index", "--find-links", str(folder), "flash-dist")
        return _require(environment, one)

    def try_switch(self) -> str:
        """Replace one set by another, and remove that."""
        environment, passed = self._fresh(), []
        for name in list(self.by_set)[:2]:
            one = self.by_set[name]
            environment.install(f"flash_dist=={one.version}", index=f"{self.url}{name}/")
            passed.append(_require(environment, one))
        environment.uninstall()
        if environment.leftovers():
            message = f"uninstall leaves {environment.leftovers()}"
            raise InstallError(message)
        return " -> ".join([*passed, "nothing"])

    def try_select(self, machine: str) -> str:
        """Run the command that select prints for some GPUs; doctor must be content with it."""
        environment = self._fresh()
        words = ["-m", "flash_dist", "select", "--gpu", machine, "--driver", DRIVER]
        said = json.loads(_ask_here(*words, "--index", self.url, "--json"))
        line = next(one["line"] for one in said["commands"] if one["tool"] == self.client)
        environment.install(*shlex.split(line.partition(" install ")[2]))
        version = _require(environment, self.by_set[said["chosen"]["name"]])
        words = ["-m", "flash_dist", "doctor", "--gpu", machine, "--driver", DRIVER]
        report = json.loads(environment.run(*words, "--only", "build,driver,gpu", "--json"))
        how = sorted({str(check["data"]["how"]) for check in report["checks"] if check["data"]})
        return f"{version}: {', '.join(how)}"

    def try_foreign(self, archset: ArchSet) -> str:
        """Ask for a machine with other CPUs: its pick comes, and select names its set."""
        machine, gpu = archset.machine, str(archset.archs[-1].device)
        pick = self.foreign[load_picks(ARCHSETS, machine)[self.client].name].file_name
        found = self._download(machine)
        if found != pick:
            message = f"{found} comes on {machine}, expected {pick}"
            raise InstallError(message)
        words = ["-m", "flash_dist", "select", "--gpu", gpu, "--machine", machine]
        said = json.loads(_ask_here(*words, "--index", self.url, "--json"))
        chosen = said["chosen"]["name"]
        if chosen not in self.foreign:
            message = f"select chooses {chosen} for {gpu} on {machine}"
            raise InstallError(message)
        return f"{found}; select for {gpu}: {chosen}"

    def _download(self, machine: str) -> str:
        """Return the file that the client takes from the default index on another machine."""
        folder = self._work / f"{self.client}-{machine}"
        if self.client == "pip":
            tags = {tag.rpartition("-")[2] for one in self.foreign.values() for tag in one.tags}
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", str(folder)]
            _call([*command, *(f"--platform={tag}" for tag in sorted(tags)), "flash-dist"])
            return next(folder.glob("*.whl")).name
        command = ["uv", "pip", "install", "--quiet", "--no-cache", "--no-deps"]
        command += [f"--python-platform={machine}-manylinux_2_40", "--target", str(folder)]
        _call([*command, "--python", sys.executable, "flash-dist"])
        every = (*self.foreign.values(), *self.by_set.values())
        names = {f"flash_dist-{one.version}.dist-info": one.file_name for one in every}
        return names[next(folder.glob("*.dist-info")).name]


def _machine(one: Artefact) -> str:
    return one.manifest.arch_set.machine


def _ask_here(*words: str) -> str:
    return _call([sys.executable, *words], PYTHONPATH=str(ROOT))


def _require(environment: Environment, one: Artefact) -> str:
    found = environment.version()
    if found != str(one.version):
        message = f"{found} was installed, expected {one.version}"
        raise InstallError(message)
    return found


def try_all(dist: Path) -> Iterator[Cell]:
    """Make the index anew, serve it, and try every client."""
    artefacts = find_artefacts(dist)
    with tempfile.TemporaryDirectory(prefix="flash_dist-") as folder:
        out = Path(folder) / "index"
        write_index(out, artefacts, "http://127.0.0.1/", partial=True)
        with served(out) as url:
            for client in CLIENTS:
                yield from Trial(client, url, artefacts, Path(folder)).cells()
        yield from (Cell("conda", *tried) for tried in conda_cells(artefacts, Path(folder)))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="nox -s install_test --", description="Install wheels.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--allow-missing", action="store_true", help="pass with cells not run")
    args = parser.parse_args()
    cells = []
    try:
        for cell in try_all(args.dist):
            print(cell, flush=True)
            cells.append(cell)
    except FlashDistError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    counts = {name: sum(c.outcome == name for c in cells) for name in ("ok", "FAIL", "NOT RUN")}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return int(counts["FAIL"] > 0 or (counts["NOT RUN"] > 0 and not args.allow_missing))


if __name__ == "__main__":
    sys.exit(main())
