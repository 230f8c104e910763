"""Run pip and uv, each in a fresh environment, and serve files to them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import Distribution
from typing import TYPE_CHECKING, Final

from packaging.tags import sys_tags

from ci.install_tests.results import InstallError, NotRunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from packaging.version import Version

    from flash_dist.toolkit.make.wheels.artefacts import Artefact

CLIENTS: Final = ("pip", "uv")
ANY_VERDICT: Final = (0, 1, 3)  # exit statuses of doctor, also without torch or a GPU
_OURS: Final = re.compile("flash[_-]dist")
_SAID: Final = 300  # characters shown from each end of a failed command's output
_UNSHARED: Final = (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net"))


class Environment:
    """A fresh virtual environment, and the client that installs into it."""

    def __init__(self, client: str, folder: Path, index: str, cache: Path | None = None) -> None:
        self.client = client
        self.folder = folder
        self.index = index  # replaces PyPI
        self._cache = ["--cache-dir", str(cache)] if cache else []
        self.python = folder / "bin" / "python"
        call(["uv", "venv", "--quiet", "--python", sys.executable, str(folder)])

    def install(self, *words: str, index: str = "", within: Sequence[str] = ()) -> None:
        """Install without dependencies: these tests do not concern torch.

        Args:
            words: Requirements, and options that pip and uv share.
            index: The only index. If empty, `self.index` is the only index.
            within: Prefix of the client's command: `unshare --net`.
        """
        if self.client == "pip":
            command = [sys.executable, "-m", "pip", "--python", str(self.python), "install"]
            command += ["--quiet", "--no-deps", *(self._cache or ["--no-cache-dir"])]
        else:
            command = ["uv", "pip", "install", "--python", str(self.python)]
            command += ["--quiet", "--no-deps", *(self._cache or ["--no-cache"])]
        named = {"PIP_INDEX_URL": index or self.index, "UV_DEFAULT_INDEX": index or self.index}
        call([*within, *command, *words], named)

    def uninstall(self) -> None:
        """Uninstall the package."""
        if self.client == "pip":
            command = [sys.executable, "-m", "pip", "--python", str(self.python)]
            call([*command, "uninstall", "--quiet", "--yes", "flash_dist"])
        else:
            call(["uv", "pip", "uninstall", "--quiet", "--python", str(self.python), "flash_dist"])

    def version(self) -> str:
        """Return the version of the imported package."""
        return self.run("-c", "import flash_dist; print(flash_dist.__version__)").strip()

    def require(self, version: Version) -> str:
        """Check that this version imports, and that no file of another version is left."""
        found = self.version()
        if found != str(version):
            message = f"{found} was installed, expected {version}"
            raise InstallError(message)
        strangers = find_strangers(self.folder)
        if strangers:
            message = f"{found} is installed, and {strangers} are not of it"
            raise InstallError(message)
        return found

    def require_sound(self, wheel: Path, record: Path) -> None:
        """Run the installed `verify` and `doctor`; load the last doctor record, save a new one."""
        program = (str(self.folder / "bin" / "flash-dist"),)
        self.run(*program, "verify", str(wheel))
        checks = ("--only", "install,build")
        self.run(*program, "doctor", *checks)
        if record.exists():
            self.run(*program, "doctor", *checks, "--load", str(record))
        self.run(*program, "doctor", "--save", str(record), "--no-selftest", fine=ANY_VERDICT)

    def run(self, *words: str, fine: Sequence[int] = (0,)) -> str:
        """Run this environment's Python; it imports dependencies from the test's own Python."""
        place = next(path for path in sys.path if path.endswith("site-packages"))
        variables = {"PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1"}
        return call([str(self.python), *words], variables, fine=fine)

    def leftovers(self) -> list[Path]:
        """Return the remaining files of the package."""
        return find_files(self.folder)


def find_files(folder: Path) -> list[Path]:
    """Find the files of flash_dist below a folder, including its console script."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return sorted(path for path in files if _OURS.search(str(path.relative_to(folder))))


def find_strangers(folder: Path) -> list[str]:
    """Find files of the package that the RECORD of the installed version does not list.

    Raises:
        InstallError: No version is installed, or more than one.
    """
    infos = sorted(folder.rglob("flash_dist-*.dist-info"))
    if len(infos) != 1:
        message = f"there is not one flash_dist-*.dist-info but {[path.name for path in infos]}"
        raise InstallError(message)
    site = infos[0].parent
    listed = Distribution.at(infos[0]).files or ()
    recorded = {os.path.normpath(site / file) for file in listed}  # scripts: `../../../bin/x`
    found = (str(path) for path in find_files(folder))
    return [os.path.relpath(path, site) for path in found if path not in recorded]


def call(
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    *,
    fine: Sequence[int] = (0,),
) -> str:
    """Run a command without this machine's index settings, and return its output.

    Args:
        command: The words of the command.
        variables: Additional environment variables.
        fine: Accepted exit statuses.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "PYTHON"))}
    closed = {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_OFFLINE": "0"}
    closed |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return call_openly(command, {**kept, **closed, **(variables or {})}, fine=fine)


def call_openly(
    command: Sequence[str], environ: Mapping[str, str], *, fine: Sequence[int] = (0,)
) -> str:
    """Run a command with exactly these environment variables, outside the source tree."""
    done = subprocess.run(
        command, env=environ, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False
    )
    if done.returncode not in fine:
        said = " ".join((done.stderr or done.stdout).split())
        if len(said) > 2 * _SAID:
            said = f"{said[:_SAID]} ... {said[-_SAID:]}"
        message = f"`{shlex.join(command[:6])} ...` ended with {done.returncode}: {said}"
        raise InstallError(message)
    return done.stdout


def without_network() -> tuple[str, ...]:
    """Return the prefix of a command that runs without a network, even without loopback.

    Raises:
        NotRunError: This machine cannot run a command without a network.
    """
    command = _find_unshare()
    if not command:
        message = "`unshare --net` is refused here, so that the network stays on"
        raise NotRunError(message, hint="run it as root, or allow user namespaces")
    return command


@cache
def _find_unshare() -> tuple[str, ...]:
    for words in _UNSHARED:
        try:
            call([*words, "true"])
        except (InstallError, OSError):
            continue
        return words
    return ()


def runs_here(one: Artefact) -> bool:
    """Tell if a wheel is for this machine and this Python."""
    return not {str(tag) for tag in sys_tags()}.isdisjoint(one.tags)


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, as `python -m http.server` does; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
