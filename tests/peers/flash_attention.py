"""Run flash-attention's own tests through flash_dist.compat, changing only their imports.

    python tests/peers/flash_attention.py CHECKOUT [--served 490] [--others 40] [PYTEST ...]
    python tests/peers/flash_attention.py CHECKOUT --suite 3 --served 400
    python tests/peers/flash_attention.py CHECKOUT --device cpu --longest 256 --served 60

The program needs an installed flash_dist, pytest, einops, and a GPU unless another device is
chosen. flash-attention's file has some 400,000 cases. For each test the program runs two seeded
samples: supported cases, which must pass, and other cases, which our functions should refuse and
which are counted. Suite 3 is flash-attention 3's tests of caches, also with attention_chunk at 0.
Run it as a file, so that Python does not find the sources of flash_dist beside the installed
package.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    Case = tuple[Any, ...]

DROPPED: Final = "names that are not served, not imported:"
SERVED, OTHER = "served", "other"
REFUSALS: Final = (ValueError, TypeError)

LENGTHS: Final = ("seqlen", "seqlen_q", "seqlen_k")
LONG: Final = {"test_flash_attn_race_condition": 20}  # a case takes 250 runs: try fewer


@dataclass(frozen=True)
class Suite:
    """A file of tests and the replacements of its imports."""

    file: str  # path in a checkout
    modules: Mapping[str, str]  # imported module -> our module, including submodules
    truths: Mapping[str, str]  # module that only tests need -> our replacement
    # Argument -> predicate of supported values. Other arguments may have any value.
    neutral: Mapping[str, Callable[[Any], bool]]
    is_apart: Callable[[Mapping[str, Any]], bool]  # True if arguments exclude each other
    beside: tuple[str, ...] = ()  # files of the same folder that the tests import
    changes: Mapping[str, str] = field(default_factory=dict)  # pattern -> replacement
    options: tuple[str, ...] = ()  # options for pytest

    def is_neutral(self, named: Mapping[str, Any]) -> bool:
        """Tell if a case has supported arguments only."""
        asked = (check(named[name]) for name, check in self.neutral.items() if name in named)
        return all(asked) and not self.is_apart(named)


SUITES: Final = {
    "2": Suite(
        file="tests/test_flash_attn.py",
        modules={"flash_attn": "flash_dist.compat.flash_attn"},
        truths={"apply_rotary_emb": "rotary"},
        neutral={},
        is_apart=lambda named: bool(
            (named.get("softcap") and named.get("dropout_p"))
            # A cache is not copied to add columns.
            or (("new_kv" in named or named.get("paged_kv_block_size")) and named["d"] % 8)
        ),
        # Queries with pages must not require gradients; this test does not use the gradients.
        changes={
            r"(?m)^( *)q_unpad,\n( *k_unpad if paged_kv_block_size is None)": (
                r"\1q_unpad if paged_kv_block_size is None else q_unpad.detach(),\n\2"
            ),
            r"\bUSE_TRITON_ROCM\b": "False",  # evaluated on import
            # Our S_dmask is normalised; flash-attention's is relative to the largest score so far.
            r"\battn = normalize_flash_attn_S\((?s:.*?)\n        \)": "attn = attn_unnorm",
        },
    ),
    "3": Suite(
        file="hopper/test_flash_attn.py",
        modules={
            "flash_attn": "flash_dist.compat.flash_attn",
            "flash_attn_interface": "flash_attention_3",
        },
        truths={"apply_rotary_emb": "rotary"},
        neutral={
            "dtype": lambda value: value.itemsize > 1,
            "page_size": lambda value: value is None or value % 16 == 0,
            "has_rotary_seqlens": lambda value: not value,
            "varlen_q": lambda value: not value,
        },
        is_apart=lambda named: bool(
            named.get("page_size") and (named.get("has_leftpad") or named.get("has_batch_idx"))
        ),
        beside=("test_util.py", "padding.py"),
        changes={r"(?m)^( *attention_chunk_vals = ).*$": r"\1[0]"},
        options=("-k", "test_flash_attn_kvcache"),
    ),
}


def rewrite_imports(
    text: str, has: Callable[[str, str], bool], suite: Suite = SUITES["2"]
) -> tuple[str, list[str]]:
    """Import from compat the names that compat has; return the file and the missing names."""
    lines, dropped = text.splitlines(), []
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: node.lineno, reverse=True):
        package, _, rest = (node.module or "").partition(".")
        if package not in suite.modules:
            continue
        module = ".".join(filter(None, (suite.modules[package], rest)))
        names = [one.name for one in node.names if has(module, one.name)]
        others = [one.name for one in node.names if one.name not in names]
        dropped += [name for name in others if name not in suite.truths]
        new = [f"from {module} import {', '.join(names)}"] if names else []
        truths = [name for name in others if name in suite.truths]
        new += [f"from {suite.truths[name]} import {name}" for name in truths]
        indent = " " * node.col_offset
        new = new or ["pass"] if indent else new  # a block must not be empty
        lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in new]
    return "\n".join([*lines, ""]), sorted(dropped)


def move_to_cpu(text: str) -> str:
    """Make a file use CPU tensors, and treat the CPU as a supported GPU."""
    return text.replace('torch.cuda.get_device_capability("cuda")', "(9, 0)").replace(
        '"cuda"', '"cpu"'
    )


def has_name(module: str, name: str) -> bool:
    """Tell if a program could import a name from a module."""
    try:
        return hasattr(import_module(module), name)
    except ModuleNotFoundError:
        return False


class Drawn:
    """A seeded sample of the cases of one test, without expanding all of them."""

    def __init__(self, axes: Sequence[tuple[str, Sequence[Any]]], seed: str) -> None:
        self.names = [name.strip() for names, _ in axes for name in names.split(",")]
        self._axes = [values for _, values in axes]
        self._wide = ["," in names for names, _ in axes]
        self._random = random.Random(seed)  # noqa: S311 - a sample, no secret
        self.size = prod(map(len, self._axes))

    def draw(self, count: int, *, wanted: Callable[[Case], bool]) -> list[Case]:
        """Return up to `count` different wanted cases, in order of appearance."""
        if self.size <= 20_000:  # shuffle only small ranges
            cases = list(map(self._flatten, product(*self._axes)))
            self._random.shuffle(cases)
            return list(islice(filter(wanted, cases), count))
        found: dict[str, Case] = {}
        for _ in range(200 * count):
            case = self._flatten([self._random.choice(values) for values in self._axes])
            if wanted(case):
                found.setdefault(repr(case), case)
            if len(found) == count:
                break
        return list(found.values())

    def _flatten(self, picked: Sequence[Any]) -> Case:
        pairs = zip(picked, self._wide, strict=True)
        return tuple(value for one, wide in pairs for value in (one if wide else (one,)))

    def is_neutral(self, case: Case, suite: Suite = SUITES["2"]) -> bool:
        """Tell if a case has supported arguments only."""
        return suite.is_neutral(dict(zip(self.names, case, strict=True)))

    def is_short(self, case: Case, longest: int) -> bool:
        """Tell if all lengths of a case are at most `longest`."""
        named = zip(self.names, case, strict=True)
        return all(value <= longest for name, value in named if name in LENGTHS)


# From here on: a pytest plugin, loaded in every process of a run.
OUTCOMES: Final[Counter[tuple[str, str, str]]] = Counter()  # test, kind, outcome


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    parser.addoption("--served", type=int, required=True, help="cases of each test")
    parser.addoption("--others", type=int, required=True, help="cases of each test")
    parser.addoption("--suite", choices=SUITES, required=True)
    parser.addoption("--seed", required=True)
    parser.addoption("--dropped", default="", help="names that are not imported")
    parser.addoption("--longest", type=int, required=True, help="tokens")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a sample of a test's combinations of parameters instead of all."""
    option, name = metafunc.config.getoption, metafunc.definition.originalname
    marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
    drawn = Drawn([mark.args[:2] for mark in marks], f"{option('--seed')} {name}")
    absent = set(metafunc.function.__code__.co_names) & set(option("--dropped").split(","))

    def draw(count: int, *, served: bool) -> list[Case]:
        def is_wanted(case: Case) -> bool:
            neutral = not absent and drawn.is_neutral(case, SUITES[option("--suite")])
            return neutral == served and drawn.is_short(case, option("--longest"))

        return drawn.draw(count, wanted=is_wanted)

    wanted = max(1, option("--served") // LONG.get(name, 1))
    cases = {SERVED: draw(wanted, served=True), OTHER: draw(option("--others"), served=False)}
    ids = [f"{kind}-{number}" for kind in cases for number in range(len(cases[kind]))]
    for mark in marks:
        metafunc.definition.own_markers.remove(mark)
    values = [case for kind in cases for case in cases[kind]]
    metafunc.parametrize(drawn.names, values, ids=ids)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Record whether a failure is a refusal; an unsupported case that is refused does not fail."""
    report = yield
    report.kind = SERVED if f"[{SERVED}-" in item.name else OTHER
    # NOTE: xdist does not transfer an attribute named `result`.
    report.ending = report.outcome
    if call.excinfo is not None and report.failed and _is_refusal(item, call.excinfo):
        report.ending = "refused"
        if report.kind == OTHER:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"refused: {call.excinfo.value}")
    return report


def _is_refusal(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
    error, place = excinfo.value, Path(str(excinfo.traceback[-1].path))
    if isinstance(error, NameError):
        return error.name in item.config.getoption("--dropped").split(",")
    return isinstance(error, REFUSALS) and "flash_dist" in place.parts


def pytest_runtest_logreport(report: Any) -> None:  # noqa: ANN401 - with what makereport added
    """Count the outcome, in the process that collects all reports."""
    if report.when == "call" or report.outcome != "passed":
        OUTCOMES[
            report.nodeid.rpartition("::")[2].partition("[")[0], report.kind, report.ending
        ] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how the cases of each test ended."""
    for kind in (SERVED, OTHER):
        counts = {key: count for key, count in OUTCOMES.items() if key[1] == kind}
        for test in sorted({key[0] for key in counts}):
            ends = [f"{n} {key[2]}" for key, n in sorted(counts.items()) if key[0] == test]
            terminalreporter.write_line(f"{kind:6}  {test}: {', '.join(ends)}")
        total: Counter[str] = Counter()
        for key, count in counts.items():
            total[key[2]] += count
        ends = [f"{count} {end}" for end, count in sorted(total.items())] or ["none"]
        terminalreporter.write_line(f"{kind:6}  all {sum(total.values())}: {', '.join(ends)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="of flash-attention, such as v2.8.3")
    parser.add_argument(
        "--served", type=int, default=490, help="cases of each test that are served"
    )
    parser.add_argument("--others", type=int, default=40, help="cases of each test that are not")
    parser.add_argument("--suite", default="2", choices=SUITES, help="version 2's tests, or 3's")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--longest", type=int, default=sys.maxsize, help="tokens of a sequence")
    args, options = parser.parse_known_args(argv)
    suite = SUITES[args.suite]
    source = args.checkout / suite.file
    changed, dropped = rewrite_imports(source.read_text(encoding="utf-8"), has_name, suite)
    changed = move_to_cpu(changed) if args.device == "cpu" else changed
    for pattern, put in suite.changes.items():
        changed = re.sub(pattern, put, changed)
    print(DROPPED, ", ".join(dropped) or "none")  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "test_flash_attn.py")
        path.write_text(changed, encoding="utf-8")
        for name in suite.beside:
            shutil.copy(source.with_name(name), folder)
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        here = Path(__file__).resolve()
        plugin = ["-p", here.stem, f"--seed={args.seed}", f"--dropped={','.join(dropped)}"]
        plugin += [f"--served={args.served}", f"--others={args.others}", f"--suite={args.suite}"]
        plugin += [f"--longest={args.longest}", *suite.options]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugin, *options, str(path)]
        found = [str(here.parent), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
        return subprocess.run(command, cwd=folder, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
