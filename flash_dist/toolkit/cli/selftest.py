"""`selftest`: runs the kernels, and checks the values and the bits of their results."""

from __future__ import annotations

import datetime as dt
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ..checks.driver import explain_broken
from ..checks.environment import gather_gpus
from ..checks.install import require_torch
from ..doctor.proof import Proof, run_on_cpu
from ..errors import KernelsError, UsageError
from ..findings.driver import NO_GPU
from ..findings.result import CheckResult, exit_code, worst_status
from ..machine.installed import read_installed
from ..product import NO_CASES, PRODUCT, PROGRAM
from ..selftest.fingerprints import merge_references, read_references, write_references
from ..selftest.report import RanVariant
from ..selftest.run import DEFAULT_RUNS, DEFAULT_TIMEOUT, check_selftest
from ..targets.wording import read_whole
from .options import add_json, add_runs, add_subcommand, parse_path
from .terminal.progress import testing
from .terminal.results import is_shown, make_console, print_result
from .terminal.text import complain, printable

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from ..checks.environment import Environment
    from ..machine.libcuda import Cuda
    from ..selftest.fingerprints import Reference
    from .options import Subparsers

EPILOG = f"""\
examples:
  {PROGRAM} selftest
  {PROGRAM} selftest --runs 1000 --device 1
  {PROGRAM} selftest --device cpu --runs 2

exit status: 0 no failure, 1 at least one failure, 2 wrong usage, 3 no GPU to test
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "selftest",
        summary="run the kernels: check bits, values and crashes",
        description="Run the cases of the package on every GPU, with poisoned memory and on two "
        "streams at once. The results must have the same bits in all runs and agree with a float64 "
        "reference.",
        epilog=EPILOG,
    )
    add_runs(parser, DEFAULT_RUNS)
    parser.add_argument(
        "--device",
        type=parse_device,
        metavar="N",
        help="number of one GPU in CUDA's order (default: all), or `cpu` for the reference path",
    )
    parser.add_argument(
        "--timeout",
        type=parse_timeout,
        default=DEFAULT_TIMEOUT,
        metavar="S",
        help="time limit for each GPU, in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--reference",
        type=parse_path,
        metavar="FILE",
        help="compare with the fingerprints in FILE (default: those of the package)",
    )
    parser.add_argument(
        "--record",
        type=parse_path,
        metavar="FILE",
        help="write the fingerprints of these GPUs to FILE",
    )
    add_json(parser, "selftest")
    parser.set_defaults(run=run)


def parse_device(text: str) -> str:
    """Read a device: a number or `cpu`."""
    if text != "cpu" and read_whole(text) is None:
        message = f"device must be a GPU number or `cpu`, got `{text:.60}`"
        raise UsageError(message, hint=f"`{PROGRAM} doctor` lists the GPUs")
    return text


def parse_timeout(text: str) -> float:
    """Parse a number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        message = f"timeout must be a positive, finite number of seconds, got `{text:.60}`"
        raise UsageError(message, hint=f"`--timeout {DEFAULT_TIMEOUT:g}` is the default")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Test each device, print results as they arrive, and return the exit code."""
    if not PRODUCT.cases:
        hint = "its authors name one by `cases` of [tool.kernels.selftest]"
        raise UsageError(NO_CASES, hint=hint)
    environment = gather_gpus(read_installed())
    cuda, torch = environment.cuda, environment.torch
    references = read_references(args.reference) if args.reference else None
    runs = args.runs or DEFAULT_RUNS
    proof = Proof(environment, runs=runs, timeout=args.timeout, references=references)
    known = read_known(args.record, proof)
    proof.working = testing(silent=args.json)
    console = make_console()
    results = []
    devices = choose_devices(args.device, cuda)
    with proof.side_by_side(gpu for gpu in cuda.gpus if str(gpu.index) in devices):
        for device in devices if torch.status == "ok" else ():
            results.append(prove_device(device, proof, environment, args))
            if not args.json and is_shown(results[-1], quiet=args.quiet):
                print_result(console, results[-1])
                _print_variants(results[-1], verbose=args.verbose)
    tested = tuple(results)
    if tested:
        together = proof.compare_gpus()
        results += [replace(together, name="agreement")] if together is not None else []
    else:
        nothing = require_torch(torch) if devices else _nothing_to_test(cuda)
        results.append(replace(nothing, name="selftest"))
    for result in results[len(tested) :]:
        if not args.json and (not tested or is_shown(result, quiet=args.quiet)):
            print_result(console, result)
    if not args.json and tested and not is_shown(results[-1], quiet=args.quiet):
        print_result(console, results[-1])  # --quiet prints the last result, too
    code = exit_code(tuple(results), checked_gpu=bool(tested))
    if args.json:
        print(json.dumps(_to_json(tested, results, code), indent=2))
    if args.record:
        record(args.record, proof, known, code)
    return code


def prove_device(
    device: str, proof: Proof, environment: Environment, args: argparse.Namespace
) -> CheckResult:
    """Run the selftest of a GPU, or of the reference path."""
    name = f"selftest {device}"
    if device == "cpu":
        runs = args.runs or DEFAULT_RUNS
        report = run_on_cpu(runs, timeout=args.timeout, working=proof.working)
        return replace(check_selftest(report), name=name)
    gpu = next(gpu for gpu in environment.cuda.gpus if str(gpu.index) == device)
    return replace(proof.run(gpu), name=name, gpu=gpu.index)


def read_known(path: Path | None, proof: Proof) -> tuple[Reference, ...]:
    """Return the fingerprints in a file that others are to be added to; none for a new file.

    Raises:
        KernelsError: The file is broken, or the installed kernels cannot be read.
    """
    if path is None:
        return ()
    proof.require_kernels()
    return read_references(path) if path.exists() else ()


def record(path: Path, proof: Proof, known: tuple[Reference, ...], code: int) -> None:
    """Add the fingerprints of the tested GPUs to a file; leave it unchanged unless all passed."""
    if code or not proof.proven:
        needed = "`--record` needs at least one GPU, and all must pass"
        complain(f"`{printable(str(path))}` was not written: {needed}")
        return
    today = dt.datetime.now(dt.timezone.utc).date().isoformat()
    write_references(path, merge_references(known, proof.record(today)))


def choose_devices(asked: str | None, cuda: Cuda) -> list[str]:
    """Return the devices to test: the requested one, or all GPUs."""
    known = [str(gpu.index) for gpu in cuda.gpus]
    if asked is None:
        return known
    if asked != "cpu" and asked not in known:
        allowed = f"{', '.join(known)} or cpu" if known else "cpu (no GPU was found)"
        message = f"device must be {allowed}, got {asked}"
        raise KernelsError(message, hint=f"`{PROGRAM} doctor` lists the GPUs")
    return [asked]


def _print_variants(result: CheckResult, *, verbose: bool) -> None:
    for variant in result.data["loaded"] if verbose else ():
        print(f"{'':20}{RanVariant(**variant)}")


def _nothing_to_test(cuda: Cuda) -> CheckResult:
    reason = f" ({cuda.reason})" if cuda.reason else ""
    summary = f"no GPU was found, so nothing could be tested{reason}"
    if cuda.status == "broken":
        entry = explain_broken(cuda)
        return CheckResult("fail", summary, fix=entry.remedy, entry=entry)
    fix = "`--device cpu --runs 2` tests the reference path in a minute or two"
    return CheckResult("skip", summary, fix=fix, entry=NO_GPU)


def _to_json(
    tested: tuple[CheckResult, ...], results: list[CheckResult], code: int
) -> dict[str, object]:
    return {
        "version": 1,
        "command": "selftest",
        "status": worst_status(tuple(results)),
        "exit_code": code,
        "ids": [result.id for result in results if result.id],
        "summaries": [result.summary for result in results],
        "devices": [dict(result.data) for result in tested],
    }
