"""Makes a local manylinux_2_28 image without an image registry; see `nox -s image`.

Debian 11 has the oldest glibc (2.31) that Debian's mirrors still serve. Code from its g++ 10 needs
no glibc newer than 2.28, which auditwheel checks for every wheel.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import KernelsError
from ..command import command
from ..declared.names import DISTRIBUTION
from ..locks import lock_path
from ..project import TEMPORARY
from ..toolchain.cross import TARGETS
from .engine import inspect_image

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IMAGE = f"localhost/{DISTRIBUTION}-manylinux_2_28:1"
BASE = f"localhost/{DISTRIBUTION}-bullseye:1"
CONTAINERFILE = Path(__file__).resolve().with_name("Containerfile")
INSTALLED = tuple(map(lock_path, ("image", "image_oldest")))  # locks of packages from PyPI
CONTAINERS_CONF = Path(__file__).resolve().with_name("containers.conf")
LABEL = f"{DISTRIBUTION}.recipe"

MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
TOOLS = ("podman", "runc", "mmdebstrap")
HOST_PACKAGES = (*TOOLS, "netavark", "debian-archive-keyring", "dpkg-dev")
ROOT_PACKAGES = (
    *("python3", "python3-venv", "g++", "make", "ca-certificates", "file", "git"),
    *("libssl-dev", "zlib1g-dev", "libffi-dev", "libbz2-dev", "liblzma-dev", "libsqlite3-dev"),
    *TARGETS["aarch64"].packages.split(),
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MIN_MEMORY_DISK = 3 << 30  # free bytes for a Debian root in /dev/shm, which is faster than a disk


class ImageError(KernelsError):
    """Raised if the image cannot be made."""


def recipe() -> str:
    """Return a digest of everything that determines the image."""
    files = (path.read_text(encoding="utf-8") for path in (CONTAINERFILE, *INSTALLED))
    text = "\n".join([MIRROR, *ROOT_PACKAGES, *files])
    return hashlib.sha256(text.encode()).hexdigest()


def engine_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make podman read our settings, unless the user names other settings."""
    return {"CONTAINERS_CONF": str(CONTAINERS_CONF), **environ}


def is_current(environ: Mapping[str, str]) -> bool:
    """Tell if the image exists and was made from the current recipe."""
    if shutil.which("podman") is None:
        return False
    question = f'{{{{index .Config.Labels "{LABEL}"}}}}'
    return inspect_image("podman", IMAGE, question, environ) == recipe()


def require_root() -> None:
    """Raise unless this process is root and the machine has apt-get."""
    if os.geteuid() != 0:
        message = "`nox -s image` needs root: it installs podman and unpacks a Debian root"
        raise ImageError(message, hint="run it as root, or use a registry's image as it is")
    if shutil.which("apt-get") is None:
        message = "`nox -s image` needs apt-get, which this machine does not have"
        raise ImageError(message, hint="run it on Debian or Ubuntu")


def make_image(environ: Mapping[str, str]) -> None:
    """Make the image: install the tools, unpack a Debian root, compile Python in it."""
    _install_tools()
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}image-", dir=_fast_folder()) as name:
        folder = Path(name)
        _import_base(folder / "root.tar", environ)
        context = folder / "context"
        context.mkdir()
        _fetch_python(folder / "apt", context / "python.tar.gz")
        shutil.copyfile(_ca_bundle(environ), context / "ca-certificates.crt")
        for path in INSTALLED:
            shutil.copy(path, context)
        command = ["podman", "build", "--tag", IMAGE, "--label", f"{LABEL}={recipe()}"]
        options = ["--build-arg", f"BASE={BASE}", "--file", str(CONTAINERFILE), str(context)]
        _run([*command, *options], environ)


def _fast_folder() -> str | None:
    """Return a tmpfs with room for a Debian root, or None. On a disk, dpkg's syncs take longer."""
    folder = Path("/dev/shm")  # noqa: S108  # its contents lie in a fresh private folder
    if folder.is_dir() and shutil.disk_usage(folder).free > MIN_MEMORY_DISK:
        return str(folder)
    return None


def _install_tools() -> None:
    keyring = Path(KEYRING).is_file()
    if keyring and all(shutil.which(tool) for tool in TOOLS):
        return
    _run(["apt-get", "update", "--quiet=2"], os.environ)
    command = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends"]
    _run([*command, *HOST_PACKAGES], os.environ)


def _import_base(tar: Path, environ: Mapping[str, str]) -> None:
    packages = ",".join(ROOT_PACKAGES)
    command = ["mmdebstrap", "--variant=minbase", f"--include={packages}", f"--keyring={KEYRING}"]
    _run([*command, "bullseye", str(tar), MIRROR], {**environ, "TMPDIR": str(tar.parent)})
    _run(["podman", "import", "--change", f"ENV PATH={PATH}", str(tar), BASE], environ)
    tar.unlink()


def _fetch_python(folder: Path, target: Path) -> None:
    """Download CPython's tarball as part of Debian's source package; apt checks its signature."""
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    sources = folder / "sources.list"
    sources.write_text(f"deb-src [signed-by={KEYRING}] {MIRROR} bookworm main\n", encoding="utf-8")
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": folder / "state",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    words = [f"-o{name}={value}" for name, value in options.items()]
    _run(["apt-get", *words, "--quiet=2", "update"], os.environ, folder)
    source = ["source", "--download-only", "python3.11"]
    _run(["apt-get", *words, "--quiet=2", *source], os.environ, folder)
    shutil.move(next(folder.glob("python3.11_*.orig.tar.gz")), target)


def _ca_bundle(environ: Mapping[str, str]) -> Path:
    """Return the file of certificates that this machine trusts, including those of a proxy."""
    named = environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if named and Path(named).is_file():
        return Path(named)
    return Path("/etc/ssl/certs/ca-certificates.crt")


def _run(command: Sequence[str], environ: Mapping[str, str], folder: Path | None = None) -> None:
    print("$", *command, flush=True)
    done = subprocess.run(command, check=False, env=dict(environ), cwd=folder)
    if done.returncode:
        message = f"`{' '.join(command[:2])}` failed with exit code {done.returncode}"
        raise ImageError(message, hint="its output is above")


@command
def main() -> int:
    """Run the command and return its exit status."""
    environ = engine_environ(os.environ)
    if is_current(environ):
        print(f"{IMAGE} is up to date")
    else:
        print("this needs root: it installs podman by apt and unpacks a Debian root; 6 minutes")
        require_root()
        make_image(environ)
    print(f"build in it with: CIBW_MANYLINUX_X86_64_IMAGE={IMAGE} nox -s build_wheels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
