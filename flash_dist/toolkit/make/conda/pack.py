"""Packs wheels as conda packages and writes the folder of the channel; see `channel.py`."""

from __future__ import annotations

import base64
import hashlib
import shutil
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rattler_build import RattlerBuildError, assemble_package

from ...audit.files import INSTALLER
from ...binaries.wheel import open_wheel
from ...builds.conda_package import SITE
from ...errors import UsageError
from ...indexes.index import PROJECT
from ..project import TEMPORARY
from ..wheels.artefacts import Artefact, ArtefactError, require_sound
from .check import check_package, recipe_of
from .link import add_link
from .repodata import write_repodata

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWNER: Final = b"conda\n"  # content of INSTALLER: pip leaves the files to conda
_OLDEST: Final = 315532800  # 1980, the first year of zip; rattler-build panics on earlier times


def write_channel(out: Path, artefacts: Sequence[Artefact], *, epoch: str) -> list[Path]:
    """Write the whole channel.

    Args:
        out: The folder, whose contents are deleted.
        artefacts: The wheels.
        epoch: SOURCE_DATE_EPOCH, the time stamp of everything in the packages.

    Returns:
        The paths of the packages.

    Raises:
        KernelsError: `epoch` is invalid, a wheel fails `verify`, or a package is wrong or would
            be written twice.
    """
    moment = _read_epoch(epoch)
    work = out.with_name(f"{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    (work / "noarch").mkdir(parents=True)
    for one in artefacts:
        require_sound(one)
        check_package(pack(one, work, moment), one)
    for folder in sorted(work.iterdir()):
        write_repodata(folder)
    shutil.rmtree(out, ignore_errors=True)
    work.rename(out)
    return sorted(out.rglob("*.conda"))


def _read_epoch(text: str) -> datetime:
    if not text.isdecimal() or int(text) < _OLDEST:
        message = f"SOURCE_DATE_EPOCH is a number of seconds from {_OLDEST} (1980) on, got `{text}`"
        raise UsageError(message)
    return datetime.fromtimestamp(int(text), timezone.utc)


def pack(one: Artefact, channel: Path, moment: datetime) -> Path:
    """Write the package of one wheel into the folder of its platform, and return its path."""
    recipe = recipe_of(one)
    path = channel / recipe.path
    if path.exists():
        message = f"two wheels give one conda package, `{recipe.path}`"
        raise ArtefactError(message, hint=f"remove `{one.path}` or the other one")
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        stage = Path(folder) / "stage"
        licenses = stage_wheel(one, stage)
        try:
            assemble_package(
                PROJECT,
                recipe.version,
                recipe.subdir,
                recipe.build,
                path.parent,
                files_dir=stage,
                homepage=one.metadata.homepage or None,
                license=one.metadata.license or None,
                summary=one.metadata.summary or None,
                depends=recipe.depends,
                constrains=recipe.constrains,
                build_number=recipe.build_number,
                noarch="python",  # one package for all Pythons; subdir has the platform
                license_files=licenses,
                timestamp=moment,
                compression_threads=1,
                detect_prefix=False,  # wheels contain no prefix, and their files stay unchanged
            )
        except RattlerBuildError as error:
            message = f"rattler-build does not pack `{one.file_name}`: {error}"
            raise ArtefactError(message) from error
    add_link(path, one.manifest.scripts)
    return path


def stage_wheel(one: Artefact, stage: Path) -> list[Path]:
    """Unpack a wheel as conda installs it, with conda as INSTALLER; return the licence files."""
    site = stage / SITE
    with open_wheel(one.path) as wheel:
        (record,) = (name for name in wheel.names if name.endswith(".dist-info/RECORD"))
        info = record.rpartition("/")[0]
        files = {name: wheel.read(name) for name in wheel.names}
    files[f"{info}/{INSTALLER}"] = _OWNER
    files[record] += _record_line(f"{info}/{INSTALLER}", _OWNER).encode()
    for name, data in files.items():
        target = site / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o644)  # the package stores the mode, which must not depend on the umask
    licenses = [site / name for name in files if name.startswith(f"{info}/licenses/")]
    if not licenses:
        message = f"`{one.file_name}` holds no licence to put into a conda package"
        hint = "put a file `LICENSE` beside pyproject.toml, and build the wheel again"
        raise ArtefactError(message, hint=hint)
    return licenses


def _record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"
