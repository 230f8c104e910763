"""Settings of cibuildwheel, as variables: a project needs no table [tool.cibuildwheel].

If the user has set a variable of the same name, the user's value has priority.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from ...product import NAME
from ..building.backend import UNFINISHED
from ..building.choose import NAMED
from ..building.choose import VARIABLE as LISTED
from ..compile.native import STATIC_STDCXX
from ..declared.names import COPY
from ..locks import lock_path
from ..project import (
    BUILD_FOLDER,
    EMBEDDED,
    MAKE,
    PYPROJECT,
    ROOT,
    TOOLKIT,
    load_project,
    read_pyproject,
)
from ..toolchain.cross import VARIABLE as MACHINE
from ..wheels.platform_tags import MANYLINUX
from .setup import HOME
from .smoke_test import name_variable
from .tree import PLACE

if TYPE_CHECKING:
    from pathlib import Path

PYTHON: Final = "cp311"  # one Python builds wheels for all Pythons
PROJECT: Final = "/project"  # where cibuildwheel puts the tree in the container
TESTED_TORCH: Final = name_variable(NAME)
# Environment variables that are passed to the container.
PASSED: Final = (
    "CXX",
    NAMED,
    BUILD_FOLDER,
    MACHINE,
    TESTED_TORCH,
    "MAX_JOBS",
    "PIP_FIND_LINKS",
    "SOURCE_DATE_EPOCH",
    LISTED,
    "UV_CACHE_DIR",
    "UV_FIND_LINKS",
    "UV_INDEX",
    "UV_INDEX_STRATEGY",
    "UV_LINK_MODE",
)
GROUP: Final = "test"  # the dependency group of the project's tests


def cibuildwheel_settings() -> dict[str, str]:
    """Return the settings that are the same on every machine and for every arch set."""
    # Releases are built with these settings: no object may come from a ccache of the image.
    environ = {"CUDA_HOME": str(HOME), STATIC_STDCXX: "ON", "CCACHE_DISABLE": "1"}
    if not EMBEDDED:
        environ["PYTHONPATH"] = f"{PROJECT}/{PLACE.parent.as_posix()}"
    return {
        "CIBW_BUILD": f"{PYTHON}-manylinux_x86_64",
        "CIBW_BUILD_FRONTEND": "build[uv]; args: --no-isolation --skip-dependency-check",
        "CIBW_CONFIG_SETTINGS": f"{UNFINISHED}=true",  # later steps repair and audit the wheel
        "CIBW_ENVIRONMENT_PASS": " ".join(PASSED),
        "CIBW_ENVIRONMENT": " ".join(f"{name}={value}" for name, value in environ.items()),
        "CIBW_BEFORE_ALL": f"/opt/python/{PYTHON}-{PYTHON}/bin/python -m {MAKE}.container.setup",
        "CIBW_BEFORE_BUILD": (
            f"uv pip install --quiet --require-hashes -r {_of_toolkit(lock_path('build'))}"
        ),
        "CIBW_REPAIR_WHEEL_COMMAND": (
            f"python -m {MAKE}.wheels.repair --plat {MANYLINUX} {{wheel}} {{dest_dir}}"
        ),
        "CIBW_AUDIT_REQUIRES": "",  # the session that starts cibuildwheel has the audit's tools
        **_test_settings(),
    }


def _test_settings() -> dict[str, str]:
    """Return the settings of the test step: import, doctor, and the project's tests."""
    # Module name of the toolkit in the wheel.
    toolkit = f"{NAME}.{TOOLKIT.name if EMBEDDED else COPY}"
    program = f"python {_of_toolkit(TOOLKIT / 'make' / 'container' / 'smoke_test.py')}"
    tests = load_project().tests
    command = [f"{program} {NAME} {toolkit}", *map(_of_project, tests)]
    found = {
        "CIBW_BEFORE_TEST": f"{program} {NAME} --prepare",
        "CIBW_TEST_COMMAND": " ".join(command),
        "CIBW_TEST_ENVIRONMENT": "PYTHONPATH=",  # so that tests import the wheel's toolkit
    }
    if any(path.is_dir() for path in tests):
        groups = read_pyproject(PYPROJECT).get("dependency-groups", {})
        found |= {"CIBW_TEST_GROUPS": GROUP} if GROUP in groups else {}
        found["CIBW_TEST_REQUIRES"] = "pytest"
    return found


def _of_toolkit(path: Path) -> str:
    """Return the path of a toolkit file for a cibuildwheel command."""
    return f"{{project}}/{(PLACE / path.relative_to(TOOLKIT)).as_posix()}"


def _of_project(path: Path) -> str:
    return f"{{project}}/{shlex.quote(path.relative_to(ROOT).as_posix())}"
