"""Builds one wheel per arch set into dist/<set>/ with cibuildwheel, in a manylinux container.

`nox -s build_wheels` runs this module if a container engine answers. The objects and the compiler
stay in build/container, so that the next container compiles only new targets.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...builds.published import load_archsets
from ...product import NAME
from ...targets.archs import DEFAULT_MACHINE
from ..building.build_many import Builds, BuiltWheel, build_each, report
from ..building.build_wheels import arch_environ, dist_folder, put_into_dist
from ..building.choose import choose_sets
from ..project import ARCHSETS, BUILD_FOLDER, MAKE, ROOT, TEMPORARY, load_project, read_report
from ..toolchain.cross import VARIABLE as MACHINE
from ..toolchain.cross import target_machine
from ..wheels.gates import run
from ..wheels.platform_tags import MANYLINUX, platform_of
from ..wheels.repro import digest_file, digest_files
from .engine import VARIABLE as ENGINE
from .engine import EngineError, find_engine, identify_image
from .image import IMAGE as LOCAL_IMAGE
from .image import engine_environ, is_current
from .settings import PASSED, TESTED_TORCH, cibuildwheel_settings
from .tree import add_toolkit, copy_project

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...targets.archs import ArchSet

IMAGE = "CIBW_MANYLINUX_X86_64_IMAGE"
HOST = "/host"  # where cibuildwheel's container mounts the root folder of this machine
CACHE = ROOT / "build" / "container"
UNCHANGED = "unchanged, so not built again"
HINT = (
    "its output is above; where no registry can be reached, `nox -s image` makes an image, "
    "and `-- --native` builds without one"
)


@dataclass(frozen=True)
class Note:
    """The record of a built wheel: its inputs, and its file."""

    inputs: str  # SHA-256 of sources, image and settings
    name: str
    sha256: str


def digest_inputs(tree: Path, image: str, environ: Mapping[str, str]) -> str:
    """Return the SHA-256 of all inputs of a build.

    Args:
        tree: The sources for the container.
        image: Identifier of the image.
        environ: The environment of cibuildwheel; only PASSED and CIBW_* variables are hashed.
    """
    settings = {
        name: value for name, value in environ.items() if name in PASSED or name.startswith("CIBW_")
    }
    text = json.dumps([image, settings, digest_files(tree)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find_unchanged(note: Path, inputs: str, folder: Path) -> Path | None:
    """Return the recorded wheel if neither its inputs nor its file have changed, else None."""
    try:
        made = Note(**json.loads(note.read_text(encoding="utf-8")))
        wheel = folder / made.name
        same = made == Note(inputs, wheel.name, digest_file(wheel))
    except (OSError, TypeError, ValueError):  # no note, no wheel, or a note with other fields
        return None
    return wheel if same else None


def note_wheel(note: Path, inputs: str, wheel: Path) -> None:
    """Record the inputs, name and digest of a finished wheel."""
    note.parent.mkdir(parents=True, exist_ok=True)
    made = Note(inputs, wheel.name, digest_file(wheel))
    note.write_text(json.dumps(asdict(made), indent=1) + "\n", encoding="utf-8")


def cibuildwheel_environ(
    archset: ArchSet, environ: Mapping[str, str], engine: str, *, published: bool
) -> dict[str, str]:
    """Return cibuildwheel's environment; the container gets the variables of `settings.PASSED`."""
    project = load_project()
    image = image_of(environ)
    chosen = {
        ENGINE: engine,
        **cibuildwheel_settings(),
        **environ,
        **arch_environ(archset, published=published),
        IMAGE: image,
        MACHINE: archset.machine,
        "CIBW_AUDIT_COMMAND": audit_command(archset),
        "SOURCE_DATE_EPOCH": project.epoch,
        BUILD_FOLDER: f"{HOST}{CACHE}",
        "UV_CACHE_DIR": f"{HOST}{CACHE}/uv",
        "UV_LINK_MODE": "copy",
        TESTED_TORCH: environ.get(TESTED_TORCH)
        or f"{project.torch_min} {project.torch_tested_max}".strip(),
    }
    links = environ.get("PIP_FIND_LINKS", "").split()
    if links:
        seen = " ".join(f"{HOST}{link}" if link.startswith("/") else link for link in links)
        chosen |= {"PIP_FIND_LINKS": seen, "UV_FIND_LINKS": seen.replace(" ", ",")}
    if image.startswith("localhost/"):
        chosen = engine_environ(chosen)
    if archset.machine == DEFAULT_MACHINE:
        chosen.pop("CXX", None)  # names a compiler of this machine
    else:
        chosen["CIBW_TEST_SKIP"] = "*"  # the wheel does not run here; `nox -s arm_test` tests it
    return chosen


def image_of(environ: Mapping[str, str]) -> str:
    """Return the image that the user names; by default manylinux's, or ours for a cross build."""
    other = target_machine(environ) != DEFAULT_MACHINE
    return environ.get(IMAGE) or (LOCAL_IMAGE if other else MANYLINUX)


def audit_command(archset: ArchSet) -> str:
    """Return the command of cibuildwheel's audit step: our checks, run outside the container."""
    budget = ["--budget", str(archset.budget_bytes)] if archset.budget_bytes else []
    command = [sys.executable, "-m", f"{MAKE}.wheels.gates", "--archs", str(archset), "--platform"]
    platform = platform_of(archset.machine)
    return f"{shlex.join([*command, platform, *budget])} {{wheel}}"


def build_wheel(
    archset: ArchSet, environ: Mapping[str, str], engine: str, *, published: bool
) -> BuiltWheel:
    """Let cibuildwheel build, repair, audit and test one wheel, unless it exists unchanged."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        tree, output = Path(name) / NAME, Path(name) / "wheels"
        copy_project(tree)
        add_toolkit(tree)
        chosen = cibuildwheel_environ(archset, environ, engine, published=published)
        inputs = digest_inputs(tree, identify_image(engine, chosen[IMAGE], chosen), chosen)
        note = CACHE / "wheels" / f"{archset.name}.json"
        there = find_unchanged(note, inputs, dist_folder(archset))
        if there:
            return BuiltWheel(archset, there, UNCHANGED, time.monotonic() - start)
        command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux"]
        run([*command, "--output-dir", str(output), "."], chosen, tree, hint=HINT)
        wheel = put_into_dist(next(output.glob("*.whl")), archset)
        note_wheel(note, inputs, wheel)
    seconds = time.monotonic() - start
    return BuiltWheel(archset, wheel, read_report(archset.label, CACHE), seconds)


def build_all(args: Sequence[str], environ: Mapping[str, str] = os.environ) -> Builds:
    """Build every chosen set, one container after the other."""
    engine = find_engine(environ)
    if engine is None:
        message = "no container engine answers: neither `podman info` nor `docker info`"
        raise EngineError(message, hint="start one, or build natively: `-- --native`")
    image = image_of(environ)
    if image == LOCAL_IMAGE and engine == "podman" and not is_current(engine_environ(environ)):
        message = f"the image {image} is missing, or was made by an older recipe"
        raise EngineError(message, hint="`nox -s image` makes it; `-- --native` builds without one")
    sets = load_archsets(ARCHSETS)
    choice = choose_sets(args, environ, sets)  # each set is compiled with its own toolkit
    print(choice)
    print(f"container engine: {engine}; image: {image}", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    return build_each(
        choice.sets, lambda one: build_wheel(one, environ, engine, published=one.name in sets)
    )


if __name__ == "__main__":
    sys.exit(report(build_all))
