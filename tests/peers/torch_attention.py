"""Run torch's own tests of its flash attention with our provider, and count the served calls.

    python tests/peers/torch_attention.py FOLDER [--cases 120] [--seconds 130] [PYTEST ...]
    python tests/peers/torch_attention.py FOLDER --device cpu --cases 2
    python tests/peers/torch_attention.py FOLDER --masks [--cases 30]

FOLDER is `test` of a checkout of torch, or has a file of it: `test_transformers.py`, with the tests
that may use flash attention, and `test_varlen_attention.py`. The program needs torch, flash_dist,
pytest, expecttest, and a GPU unless another device is chosen: on the CPU only varlen attention uses
the provider. The first file has some 4,000 such cases; a seeded sample of each test runs. Failures
run again without the provider, to tell failures of torch's own kernels from ours. Run it as a file,
so that Python does not find the sources of flash_dist beside the installed package.

With --masks, the tests that pass attn_mask run under `flash_dist.sdpa()` instead: torch's flash
backend takes no masks. Calls under `sdpa_kernel(SDPBackend.MATH)` stay torch's own, as they compute
the values that ours are compared with.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

FILES: Final = ("test_varlen_attention.py", "test_transformers.py")
CLASSES: Final = re.compile(
    r"Test(SDPA|SDPACudaOnly|SDPAFailureModes|AttnBias|VarlenAttention)(CUDA|CPU)$"
)
# Names in torch's tests; flash is number 0 in lists of backends.
OTHER_BACKENDS: Final = re.compile(
    r"mem_eff|cudnn|sdp_math|attention_math|fused_kernel[12]_|broadcasting_kernel1_"
)
DROPOUT: Final = re.compile(r"dropout_p_0_0*[1-9]")

# With --masks. The classes of refused calls are left out: `sdpa` serves many of those calls.
MASKED_CLASSES: Final = re.compile(
    r"Test(Transformers|SDPA|SDPACudaOnly|SDPACpuOnly|AttnBias)(CUDA|CPU)$"
)
SDPA: Final = "scaled_dot_product_attention"
MASK_PLACE: Final = 3  # of attn_mask among the arguments
REFERENCE: Final = "the reference: the math backend alone is enabled"
# Tests that compute the reference in Python, and run under `sdpa_kernel(MATH)` as a whole.
OWN_REFERENCE: Final = frozenset({"test_scaled_dot_product_attention"})

# Tests that fail with every provider, or on a busy machine.
KNOWN: Final = {
    "test_fused_backwards_throws_determinism_warning": (
        "wants the warning that torch's backward is not deterministic: ours is"
    ),
    "test_fused_sdp_priority_order": "compares times of backends",
}

SERVED, PASSED_ON, OTHER = "served", "passed on", "no flash"


@dataclass(frozen=True)
class Result:
    """Result of a case, and its calls of the provider."""

    name: str  # class::test, without the file
    test: str  # without parameters
    outcome: str  # "passed", "failed" or "skipped"
    reason: str  # first line of a failure
    served: int  # calls of torch's flash operators that our kernels served
    passed_on: dict[str, int]  # unsupported argument -> calls that went to torch's kernels
    added: int = 0  # served calls with a float mask that was added to the scores

    @property
    def kind(self) -> str:
        """The kernels that the case tested: ours if ours computed any call of the case."""
        return SERVED if self.served else PASSED_ON if self.passed_on else OTHER


@dataclass(frozen=True)
class Sample:
    """Numbers of cases to run of each test, without and with dropout, and the seed."""

    cases: int
    dropout: int
    seed: str


def draw(names: Sequence[str], tests: Sequence[str], options: Sample) -> list[int]:
    """Return the cases of a sample, in such an order that every prefix is a sample, too."""
    groups: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for place, (name, test) in enumerate(zip(names, tests, strict=True)):
        groups[test, bool(DROPOUT.search(name))].append(place)
    places = []
    for (test, drops), all_of_it in sorted(groups.items()):
        count = min(options.dropout if drops else options.cases, len(all_of_it))
        choice = random.Random(f"{options.seed} {test} {drops}")  # noqa: S311 - a sample, no secret
        places += choice.sample(all_of_it, count)
    random.Random(options.seed).shuffle(places)  # noqa: S311
    return places


# From here on: a pytest plugin, loaded in every process of a run.
START: Final = time.monotonic()
ASKED: Final[Counter[str]] = Counter()  # current case: "" for served calls, else the reason
ADDED: Final = "added"  # key in ASKED of served calls with a float mask
REGISTRATION: Final = pytest.StashKey[Any]()  # the registration ends with this object
CURRENT: Final[set[str]] = set()  # the test that runs
RESULTS: Final[list[Result]] = []  # in the process that collects all reports


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    parser.addoption("--sample", required=True, help="JSON of a Sample, or of a list of names")
    parser.addoption("--provider", choices=("cuda", "cpu", "sdpa", "none"), required=True)
    parser.addoption("--device", choices=("cuda", "cpu"), required=True)
    parser.addoption("--seconds", type=float, required=True, help="after which no case is begun")
    parser.addoption("--results", required=True, help="file that the results are written to")


def pytest_configure(config: pytest.Config) -> None:
    """Activate the provider, and record its calls."""
    if config.getoption("--device") == "cpu":  # otherwise torch would skip the CPU cases
        platforms: Any = import_module("torch.testing._internal.common_cuda")
        platforms.PLATFORM_SUPPORTS_FLASH_ATTENTION = True
        platforms.PLATFORM_SUPPORTS_MEM_EFF_ATTENTION = True
    if config.getoption("--provider") == "none":
        return
    integration = "flash_dist.integrations.torch_sdpa"
    if config.getoption("--provider") == "sdpa":
        _record_sdpa(import_module(f"{integration}.replacement"))
        return
    calls: Any = import_module(f"{integration}.calls")
    calls.tell = lambda reason: ASKED.update([reason])
    provider = import_module(f"{integration}.provider")
    for name, serve in provider._KERNELS.items():  # wrap every operator
        provider._KERNELS[name] = _count(serve)
    if config.getoption("--provider") == "cpu":
        config.stash[REGISTRATION] = provider.Registration("CPU")
    else:
        import_module(integration).activate()


def _count(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel of the provider count the calls that it computes."""

    def counted(*args: object, **options: object) -> Any:  # noqa: ANN401
        results = serve(*args, **options)
        ASKED[""] += results is not None
        return results

    return counted


def _record_sdpa(replacement: Any) -> None:  # noqa: ANN401 - a module
    """Count the calls of `flash_dist.sdpa()`, and make it leave references to torch.

    Calls that torch.compile traces are not counted: counting would split their graphs.
    """
    attend, find = replacement.attend, replacement._find_call
    compiling = import_module("torch.compiler").is_compiling
    backends = import_module("torch.backends.cuda")

    def count(*call: Any, **options: object) -> Any:  # noqa: ANN401
        results = attend(*call, **options)
        if not compiling():
            ASKED.update({"": 1, ADDED: int(call[-1].scores is not None)})
        return results

    def find_call(*args: object, **options: object) -> Any:  # noqa: ANN401
        left = not compiling() and _is_reference(backends)
        return REFERENCE if left else find(*args, **options)

    def tell(reason: str) -> None:
        if not compiling():
            ASKED.update([reason])

    replacement.attend, replacement._find_call, replacement.tell = count, find_call, tell


def _is_reference(backends: Any) -> bool:  # noqa: ANN401 - a module
    """Return whether only the math backend is enabled, to compute what a test compares with."""
    names = "flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled"
    return not CURRENT & OWN_REFERENCE and not any(getattr(backends, name)() for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a case under `flash_dist.sdpa()`, also where its file imported torch's function."""
    if item.config.getoption("--provider") != "sdpa":
        return (yield)
    CURRENT.clear()
    CURRENT.add(_test(item))
    functional: Any = import_module("torch.nn.functional")
    with import_module("flash_dist").sdpa(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(item.module, SDPA, getattr(functional, SDPA), raising=False)  # type: ignore[attr-defined]
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a sample of the cases that may use flash attention, or the named ones."""
    asked = json.loads(config.getoption("--sample"))
    if isinstance(asked, list):
        items[:] = [item for item in items if _name(item) in asked]
        return
    masks = config.getoption("--provider") == "sdpa"
    mine = [
        item
        for item in items
        if (_passes_masks(item) if masks else _may_ask_for_flash(_name(item)))
    ]
    places = draw([_name(item) for item in mine], [_test(item) for item in mine], Sample(**asked))
    items[:] = [mine[place] for place in places]


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def _test(item: pytest.Item) -> str:
    """Return the test's name in its file: torch makes one test of each set of parameters."""
    names = (name for name in find_tests(item.path) if item.name.startswith(name))
    return max(names, key=len, default=item.name)


@cache
def find_tests(path: Path) -> dict[str, bool]:
    """Return the names of the tests in a file, and whether each passes attn_mask."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {
        node.name: "mask" in node.name or any(map(_has_mask, ast.walk(node)))
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _has_mask(node: ast.AST) -> bool:
    """Return whether a node calls attention with an attn_mask that is not None."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(SDPA):
        return False
    masks = [option.value for option in node.keywords if option.arg == "attn_mask"]
    masks += node.args[MASK_PLACE : MASK_PLACE + 1]
    return any(not (isinstance(mask, ast.Constant) and mask.value is None) for mask in masks)


def _passes_masks(item: pytest.Item) -> bool:
    cls = _name(item).partition("::")[0]
    passes = find_tests(item.path).get(_test(item), False) or "AttnBias" in cls
    return bool(MASKED_CLASSES.fullmatch(cls)) and passes


def _may_ask_for_flash(name: str) -> bool:
    cls, _, rest = name.partition("::")
    return bool(CLASSES.fullmatch(cls)) and not OTHER_BACKENDS.search(rest)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Attach the case's calls of the provider; xdist passes attributes on."""
    report = yield
    if call.when == "setup":
        ASKED.clear()
    error = "" if call.excinfo is None else call.excinfo.exconly().strip().partition("\n")[0]
    passed_on = {reason: count for reason, count in ASKED.items() if reason not in {"", ADDED}}
    counts = ASKED[""], passed_on, ASKED[ADDED]
    report.found = asdict(Result(_name(item), _test(item), report.outcome, error, *counts))
    return report


def pytest_runtest_logreport(report: Any) -> None:  # noqa: ANN401 - with what makereport added
    """Collect the result, in the process that gets all reports."""
    if report.when == "call" or report.outcome != "passed":
        RESULTS.append(Result(**report.found))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Stop between two cases once the time is over."""
    if time.monotonic() - START > item.config.getoption("--seconds"):
        item.session.shouldstop = "the time is over"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the collected results."""
    if not hasattr(session.config, "workerinput"):
        path = Path(session.config.getoption("--results"))
        path.write_text(json.dumps([asdict(result) for result in RESULTS]), encoding="utf-8")


# From here on: runs pytest and prints the results.
def report(results: Sequence[Result], without: Sequence[Result]) -> list[str]:
    """Return counts by test, then each failure in a line. `without`: results without provider."""
    lines = []
    for kind in (SERVED, PASSED_ON, OTHER):
        of_kind = [result for result in results if result.kind == kind]
        names = sorted({result.test for result in of_kind})
        tests = {test: [one for one in of_kind if one.test == test] for test in names}
        lines += [_tally(kind, test, cases) for test, cases in tests.items()]
        lines.append(_tally(kind, f"all {len(of_kind)}", of_kind))
    passed_on: Counter[str] = Counter()
    for result in results:
        passed_on.update(result.passed_on)
    reasons = ", ".join(f"{count} {reason}" for reason, count in passed_on.most_common())
    served = sum(result.served for result in results)
    added = sum(result.added for result in results)
    masked = f", {added} of them with a float mask" if added else ""
    lines.append(f"calls      {served} served{masked}; passed on: {reasons or 'none'}")
    return lines + _tell_failures(results, without)


def _tally(kind: str, name: str, results: Iterable[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    ends = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{kind:10} {name}: {ends or 'none'}"


def find_own(results: Sequence[Result], without: Sequence[Result]) -> list[Result]:
    """Return failures that are not expected and that torch's own kernels do not have."""
    theirs = {result.name for result in without if result.outcome == "failed"}
    failed = [result for result in results if result.outcome == "failed"]
    return [one for one in failed if one.test not in KNOWN and one.name not in theirs]


def _tell_failures(results: Sequence[Result], without: Sequence[Result]) -> list[str]:
    failed = [result for result in results if result.outcome == "failed"]
    own = find_own(results, without)
    lines = [f"failed     {len(failed)}, of which {len(own)} with the provider alone"]
    for one in failed:
        why = "alone" if one in own else KNOWN.get(one.test, "torch's own kernels fail, too")
        lines.append(f"failed     {one.name} ({one.kind}; {why}): {one.reason[:160]}")
    return lines


def move_to_cpu(text: str) -> str:
    """Make a file's GPU tests run on the CPU."""
    return text.replace('"cuda"', '"cpu"')


def run(folder: Path, args: argparse.Namespace, options: Sequence[str], **own: str) -> list[Result]:
    """Run pytest on the files in a folder, and read the output of its plugin."""
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    here = Path(__file__).resolve()
    plugin = ["-p", here.stem, f"--device={args.device}", f"--results={results}"]
    plugin += [f"--{name}={value}" for name, value in own.items()]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugin, *options, str(folder)]
    found = [str(here.parent), os.environ.get("PYTHONPATH", "")]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
        "PYTORCH_TESTING_DEVICE_ONLY_FOR": args.device,  # no cases for other devices
    }
    with contextlib.suppress(KeyboardInterrupt):  # the results so far are known
        subprocess.run(command, cwd=folder, env=environ, check=False)
    if not results.exists():
        return []
    return [Result(**one) for one in json.loads(results.read_text(encoding="utf-8"))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="`test` of a checkout of torch")
    parser.add_argument("--cases", type=int, default=120, help="of each test, without dropout")
    parser.add_argument("--dropout", type=int, default=4, help="of each test, with dropout")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for the first run")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--masks", action="store_true", help="tests with attn_mask")
    args, options = parser.parse_known_args(argv)
    texts = {name: args.folder / name for name in FILES if (args.folder / name).exists()}
    if not texts:
        parser.error(f"there is none of {' and '.join(FILES)} in {args.folder}")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        for name, path in texts.items():
            text = path.read_text(encoding="utf-8")
            text = move_to_cpu(text) if args.device == "cpu" else text
            (folder / name).write_text(text, encoding="utf-8")
        # Tests of masks with dropout draw torch's random numbers again: ours are others.
        dropout = 0 if args.masks else args.dropout
        sample = json.dumps(asdict(Sample(args.cases, dropout, args.seed)))
        provider = "sdpa" if args.masks else args.device
        with_it = {"provider": provider, "sample": sample, "seconds": str(args.seconds)}
        results = run(folder, args, options, **with_it)
        failed = [result.name for result in results if result.outcome == "failed"]
        names = {"provider": "none", "sample": json.dumps(failed), "seconds": "inf"}
        without = run(folder, args, options, **names) if failed else []
    print("\n".join(report(results, without)))  # noqa: T201
    served = any(result.served for result in results)
    return 0 if served and not find_own(results, without) else 1


if __name__ == "__main__":
    sys.exit(main())
