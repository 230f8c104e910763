"""Child processes are as isolated as their parent."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flash_dist
from tests.unit.made.sources import find_modules

PACKAGE = Path(flash_dist.__file__).parent
ASK = (
    "import json, subprocess, sys\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from flash_dist.toolkit.loading.process import python_command\n"
    "command = python_command('-c', 'import sys; print(list(sys.flags))')\n"
    "flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout\n"
    "print(json.dumps([command[1:-2], str(list(sys.flags)), flags.strip()]))\n"
)
SAFE = ["-P"] if sys.version_info >= (3, 11) else []


@pytest.mark.parametrize(
    ("given", "expected"),
    [([], []), (["-I"], ["-I"]), (["-E", "-s"], ["-E", "-s"]), (SAFE, SAFE)],
    ids=["none", "isolated", "variables and user site", "safe path"],
)
def test_a_child_looks_for_modules_where_its_parent_does(
    given: list[str], expected: list[str]
) -> None:
    command = [sys.executable, *given, "-c", ASK, str(PACKAGE.parent)]
    environ = {"LC_ALL": "C.UTF-8"}  # otherwise Python chooses another encoding
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    passed, own, childs = json.loads(done.stdout)
    assert passed == expected
    assert own == childs


def test_every_python_that_is_started_is_isolated_or_asks_for_its_parents_options() -> None:
    bare = []
    for path in find_modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List) and node.elts:
                first, *rest = map(ast.unparse, node.elts)
                if first == "sys.executable" and "'-I'" not in rest and "*given" not in rest:
                    bare.append(f"{path.name}: {ast.unparse(node)}")
    assert not bare
