"""Packages with different versions of the toolkit in one environment: each uses its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.declared.names import COPY
from flash_dist.toolkit.make.project import ROOT, TOOLKIT, find_installed
from flash_dist.toolkit.product import FILE_NAME, describe_product
from tests.unit.made.projects import write

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGES = {"my_norms": "of one toolkit", "my_norms_extra": "of another toolkit"}

LOADED = """
import importlib, json, sys
names = sys.argv[1:]
for name, toolkit in zip(names, ("_toolkit", "_toolkit", "toolkit")):
    for module in ("cli", "cli.doctor", "cli.explain", "product", "findings", "selftest.report"):
        importlib.import_module(f"{name}.{toolkit}.{module}")
modules = sys.modules.items()
print(json.dumps({key: one.__file__ for key, one in modules if getattr(one, "__file__", None)}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two packages; the toolkit of the second is changed."""
    folder = tmp_path_factory.mktemp("site")
    for name, mark in PACKAGES.items():
        package = folder / name
        for path in find_installed(TOOLKIT, TOOLKIT):
            text = path.read_text(encoding="utf-8")
            changed = text.replace("No GPU is visible to this process", f"No GPU, {mark}")
            write(package / COPY / path.relative_to(TOOLKIT), changed)
        data = {"project": {"name": name}, "tool": {"kernels": {}}}
        write(package / FILE_NAME, json.dumps(describe_product(data)))
        write(package / "archsets.json", json.dumps({"set": {}, "picks": {}}))
        write(package / "__init__.py")
        write(
            package / "__main__.py",
            f"import sys\nfrom .{COPY}.cli import main\nsys.exit(main())\n",
        )
    return folder


def run(site: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages and flash_dist, outside the sources."""
    paths = os.pathsep.join(map(str, (site, ROOT)))
    environ: Mapping[str, str] = {
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, *argv],
        check=False,
        cwd=site.parent,
        env=environ,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_speaks_through_its_own_toolkit(name: str, site: Path) -> None:
    done = run(site, "-m", name, "explain", "no-gpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"No GPU, {PACKAGES[name]}" in done.stdout
    assert f"`python -m {name} doctor" in done.stdout
    other = next(one for one in PACKAGES if one != name)
    assert PACKAGES[other] not in done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_imports_no_toolkit_of_another(name: str, site: Path) -> None:
    code = "import sys, runpy\nsys.argv = ['x', 'explain', 'no-gpu']\n"
    code += f"try:\n  runpy.run_module({name!r}, run_name='__main__')\nexcept SystemExit: pass\n"
    code += "print(*sorted({one.partition('.')[0] for one in sys.modules}), sep='\\n')"
    loaded = set(run(site, "-c", code).stdout.splitlines())
    assert loaded & {*PACKAGES, "flash_dist", "fatwheel"} == {name}


def test_all_in_one_process_keep_their_modules(site: Path) -> None:
    done = run(site, "-c", LOADED, *PACKAGES, "flash_dist")
    assert done.returncode == 0, done.stderr
    places = {"my_norms": site, "my_norms_extra": site, "flash_dist": ROOT}
    count = dict.fromkeys(places, 0)
    for module, file in json.loads(done.stdout).items():
        top = module.partition(".")[0]
        if top in places:
            assert Path(file).is_relative_to(places[top] / top), module
            count[top] += 1
    assert min(count.values()) > 20


@pytest.mark.parametrize("name", PACKAGES)
def test_fleet_names_its_own_package(name: str, site: Path) -> None:
    done = run(site, "-m", name, "fleet")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"-m {name} fleet" in done.stderr
    assert "flash_dist" not in done.stderr
    done = run(site, "-m", name, "fleet", "a.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"hint: `python -m {name} fleet --help`" in done.stderr
