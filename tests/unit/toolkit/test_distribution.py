"""The toolkit's own distribution has all of its files."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatch

from flash_dist.toolkit.make.declared.names import DISTRIBUTION
from flash_dist.toolkit.make.project import GROUPS, TOOLKIT, load_groups

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DATA = tomllib.loads(GROUPS.read_text(encoding="utf-8"))
TEMPLATE = "make/template/"  # its modules belong to another package


def list_files() -> list[str]:
    paths = (path for path in TOOLKIT.rglob("*") if path.is_file())
    names = (path.relative_to(TOOLKIT).as_posix() for path in paths)
    built = ("build/", f"{DISTRIBUTION}.egg-info/")  # left by `pip install ./toolkit`
    return sorted(
        name for name in names if "__pycache__" not in name and not name.startswith(built)
    )


def test_every_folder_of_modules_is_a_package_of_it() -> None:
    folders = {
        name.rpartition("/")[0].replace("/", ".")
        for name in list_files()
        if name.endswith(".py") and not name.startswith(TEMPLATE)
    }
    packages = {f"{DISTRIBUTION}.{one}".strip(".") for one in folders}
    assert set(DATA["tool"]["setuptools"]["packages"]) == packages
    assert DATA["tool"]["setuptools"]["packages"] == sorted(packages)


def test_every_other_file_is_data_of_it() -> None:
    patterns = DATA["tool"]["setuptools"]["package-data"][DISTRIBUTION]
    others = {one for one in list_files() if one.startswith(TEMPLATE) or not one.endswith(".py")}
    left_out = {one for one in others if not any(is_matched(one, each) for each in patterns)}
    assert left_out == set()
    unused = {each for each in patterns if not any(is_matched(one, each) for one in others)}
    assert unused == set()


def is_matched(name: str, pattern: str) -> bool:
    """Tell if setuptools packs a file: `**` matches any number of folders, `*` no hidden name."""
    parts = pattern.split("/")
    return _match(name.split("/"), parts)


def _match(names: list[str], parts: list[str]) -> bool:
    if not (names and parts):
        return not (names or parts)
    if parts[0] == "**":
        return _match(names, parts[1:]) or (
            not names[0].startswith(".") and _match(names[1:], parts)
        )
    hidden = names[0].startswith(".") and not parts[0].startswith(".")
    return not hidden and fnmatch(names[0], parts[0]) and _match(names[1:], parts[1:])


def test_no_file_is_hidden_or_ignored() -> None:
    names = [name for name in list_files() if re.search(r"(^|/)\.", name)]
    assert names == []


def test_it_is_named_as_its_modules_are() -> None:
    assert DATA["project"]["name"] == DISTRIBUTION
    assert DATA["project"]["scripts"] == {DISTRIBUTION: f"{DISTRIBUTION}.__main__:main"}
    assert DATA["tool"]["setuptools"]["package-dir"] == {DISTRIBUTION: "."}


def test_its_dependencies_are_what_every_wheel_and_the_tables_need() -> None:
    needed = {*load_groups(own=False)["runtime"], "tomli; python_version < '3.11'"}
    assert set(DATA["project"]["dependencies"]) == needed


def test_every_group_that_a_group_names_is_there() -> None:
    groups = load_groups(own=False)
    named = {
        one["include-group"] for group in groups.values() for one in group if isinstance(one, dict)
    }
    assert named <= groups.keys()
