"""`python -m flash_dist bench`: compare speed and memory with other attention functions."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..toolkit.cli.options import add_subcommand, parse_path
from ..toolkit.cli.terminal.results import make_console
from ..toolkit.cli.terminal.text import complain
from ..toolkit.errors import UsageError
from ..toolkit.findings.result import EXIT_FINDINGS, EXIT_FINE, EXIT_NOTHING_CHECKED
from ..toolkit.machine.libcuda import read_cuda
from ..toolkit.machine.torch_install import read_torch
from ..toolkit.targets.wording import count, read_whole
from .baselines import sets
from .baselines.names import (
    DETERMINISTIC,
    OURS,
    PACKAGES,
    PASSES,
    PEERS,
    add_ours,
    parse_passes,
    parse_peers,
    parse_states,
)
from .baselines.shapes import DTYPES, FULL, MASKS, SETS, Mask, Shape
from .calls import CallReport, print_calls, read_run
from .plan import DEFAULTS, Plan
from .plot import draw_plot, require_matplotlib
from .results import Report, write_json
from .shown.progress import watch
from .shown.table import print_report

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ..toolkit.cli.options import Subparsers
    from .results import Row
    from .runner import Tell

DEFAULT_SECONDS = 0.4

EPILOG = """\
examples:
  python -m flash_dist bench --shapes paper --plot paper.png
  python -m flash_dist bench --shapes corners --only window --seconds 0.1
  python -m flash_dist bench --shapes seed --peers flex,sdpa-cudnn --json seed.json
  python -m flash_dist bench --shapes overhead
  python -m flash_dist bench --shapes mine --batch 4 --seqlen 4096 --heads 32/8 \\
      --head-dim 128 --mask block-causal:16

--shapes overhead measures the CPU time of calls on small problems. Its only peer is SDPA with
FLASH.

exit status: 0 measured, 1 our attention failed, results differ or calls cost too
much, 2 wrong usage, 3 no GPU to measure on
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "bench",
        summary="compare speed and memory with other attention kernels",
        description="Compare the results with those of torch's own attention kernels, then time "
        "forward, backward, both, and both under activation checkpointing, alternating between "
        "kernels, on random normal data.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--shapes",
        choices=SETS,
        default="paper",
        help="set of problems (default: %(default)s)",
    )
    passes = f"list of {','.join(PASSES)}"
    default = "the first two for paper, long, corners, scores and features, else all"
    for name, parse, text in (
        ("peers", parse_peers, f"list of {','.join(PEERS)}, or none"),
        ("phases", parse_passes, f"{passes} (default: {default})"),
        ("l2", parse_states, "L2 state before a run: warm, cold or warm,cold"),
    ):
        parser.add_argument(f"--{name}", type=parse, metavar="LIST", help=text)
    parser.add_argument(
        "--seconds",
        type=parse_seconds,
        default=DEFAULT_SECONDS,
        metavar="S",
        help="seconds per loop; each kernel runs three loops per phase (default: %(default)g)",
    )
    parser.add_argument(
        "--only",
        metavar="WORDS",
        help="problems with all of these words in their name; ` or ` separates alternatives, as in "
        "`d64 or d128 causal`",
    )
    for name, path, text in (
        ("json", "F", "write the results to F after each row"),
        ("plot", "F.png", "plot the results; needs matplotlib"),
        ("from-json", "F", "show a recorded run instead of measuring"),
    ):
        parser.add_argument(f"--{name}", type=parse_path, metavar=path, help=text)
    add_own_shape(parser)
    parser.set_defaults(run=run)


def add_own_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the problem of `--shapes mine`."""
    mine = parser.add_argument_group("--shapes mine")
    for name, default, what in (
        ("batch", 1, "number of sequences"),
        ("seqlen", 4096, "number of queries, and of keys without --seqlen-k"),
        ("seqlen-k", None, "number of keys"),
        ("head-dim", 128, "head_dim of q and k"),
        ("head-dim-v", None, "head_dim of v (default: --head-dim)"),
    ):
        text = what if default is None else f"{what} (default: {default})"
        mine.add_argument(f"--{name}", type=parse_size, metavar="N", help=text)
    mine.add_argument(
        "--heads",
        type=parse_heads,
        metavar="Q/KV",
        help="query and kv heads, such as 32/8, or 16 (default: 16)",
    )
    mine.add_argument("--mask", type=Mask.parse, help=f"{', '.join(MASKS)}")
    mine.add_argument("--dtype", choices=DTYPES)


def parse_seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        message = f"seconds must be a positive, finite number, got `{text:.60}`"
        raise UsageError(message, hint=f"`--seconds {DEFAULT_SECONDS:g}` is the default")
    return seconds


def parse_size(text: str) -> int:
    """Parse a size, a whole number of at least 1."""
    number = read_whole(text, least=1)
    if number is None:
        message = f"a size must be a whole number of at least 1, got `{text:.60}`"
        raise UsageError(message)
    return number


def parse_heads(text: str) -> tuple[int, int]:
    """Parse the numbers of query and kv heads: `32/8`, or `16` for 16 of each."""
    queries, slash, keys = text.partition("/")
    heads = (parse_size(queries), parse_size(keys if slash else queries))
    if heads[0] % heads[1] != 0:
        message = f"num_heads_kv must divide num_heads_q, got `{text:.60}`"
        raise UsageError(message)
    return heads


def choose_shapes(args: argparse.Namespace) -> tuple[Shape, ...]:
    """Return the problems that the command line selects."""
    if args.shapes == "mine":
        return (own_shape(args),)
    unused = _OWN + (_OTHERS if args.shapes == "overhead" else ())
    given = [name for name in unused if getattr(args, name)]
    if given:
        option = "--" + given[0].replace("_", "-")
        with_ = "another set of shapes" if option[2:] in _OTHERS else "`--shapes mine`"
        message = f"`{option}` needs {with_}, got `--shapes {args.shapes}`"
        raise UsageError(message)
    shapes = {
        "overhead": tuple,  # `overhead` uses calls.SHAPES
        "paper": sets.paper_shapes,
        "long": sets.long_shapes,
        "corners": sets.corner_shapes,
        "seed": sets.seed_shapes,
        "varlen": sets.varlen_shapes,
        "fp32": sets.fp32_shapes,
        "scores": sets.score_shapes,
        "features": sets.feature_shapes,
        "decode": sets.decode_shapes,
    }[args.shapes]()
    return pick_shapes(shapes, args.only or "", args.shapes)


def pick_shapes(shapes: tuple[Shape, ...], words: str, name: str) -> tuple[Shape, ...]:
    """Return the problems whose names contain all words; ` or ` separates alternatives."""
    choices = [choice.split() for choice in words.split(" or ")]
    found = tuple(x for x in shapes if any(all(w in x.name for w in choice) for choice in choices))
    if words and not found:
        message = f"no problem of `--shapes {name}` matches `--only {words}`"
        raise UsageError(message, hint=f"an example of a name is `{shapes[0].name}`")
    return found


_OTHERS = ("peers", "l2", "plot", "only")  # options that `--shapes overhead` does not accept
_OWN = ("batch", "seqlen", "seqlen_k", "head_dim", "head_dim_v", "heads", "mask", "dtype")


def own_shape(args: argparse.Namespace) -> Shape:
    """Return the problem that `--shapes mine` describes."""
    seqlen, head_dim = args.seqlen or 4096, args.head_dim or 128
    lengths = (seqlen, args.seqlen_k or seqlen)
    dims = (head_dim, args.head_dim_v or head_dim)
    heads: tuple[int, int] = args.heads or (16, 16)
    mask, dtype = args.mask or FULL, args.dtype or "bf16"
    return Shape(args.batch or 1, *lengths, *heads, *dims, mask, dtype)


def run(args: argparse.Namespace) -> int:
    """Measure, or read a recorded measurement; show it, and return the exit code."""
    report = _read_or_measure(args)
    if report is None:
        return EXIT_NOTHING_CHECKED
    console = make_console()
    if isinstance(report, CallReport):
        print_calls(console, report)
    else:
        print_report(console, report)
        if args.plot and any(row.entries[OURS].timings for row in report.rows):
            draw_plot(report, args.plot)
    return EXIT_FINDINGS if report.findings else EXIT_FINE


def _read_or_measure(args: argparse.Namespace) -> Report | CallReport | None:
    """Return a recorded or new measurement; None if nothing can be measured."""
    shapes = choose_shapes(args)
    if args.plot:
        require_matplotlib()  # fail before minutes of measuring
        if not args.plot.absolute().parent.is_dir():
            message = f"the folder of `{args.plot}` does not exist"
            raise UsageError(message)
    if args.from_json:
        return read_run(args.from_json)
    reason = find_obstacle()
    if reason:
        complain(reason)
        return None
    return _measure_calls(args.json) if args.shapes == "overhead" else _measure(args, shapes)


def find_obstacle() -> str:
    """Return why nothing can be measured here; empty if something can."""
    torch, cuda = read_torch(), read_cuda()
    if torch.status != "ok":
        return f"nothing was measured: {torch.reason}\n\nhint: {torch.advise()}"
    if not cuda.gpus:
        reason = f" ({cuda.reason})" if cuda.reason else ""
        return f"nothing was measured: no GPU was found{reason}"
    if not torch.cuda:
        return f"nothing was measured: torch {torch.version} is a CPU build"
    return ""


def _measure_calls(path: Path | None) -> CallReport:
    import torch  # noqa: PLC0415 - not needed for --help

    from .overhead import measure_calls  # noqa: PLC0415
    from .runner import describe_machine  # noqa: PLC0415

    device = torch.device("cuda", torch.cuda.current_device())
    report = CallReport(describe_machine(device), tuple(measure_calls(device)))
    save(report, path)
    return report


def _measure(args: argparse.Namespace, shapes: tuple[Shape, ...]) -> Report:
    import torch  # noqa: PLC0415 - not needed for --help

    from .baselines.packages import find_installed  # noqa: PLC0415
    from .measuring.clocks import GpuClock  # noqa: PLC0415
    from .runner import describe_machine, estimate_seconds, measure, say_duration  # noqa: PLC0415

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic mode
    peers, passes, states = DEFAULTS[args.shapes]
    absent: tuple[str, ...] = ()
    if args.peers is None:
        absent = tuple(x for x in PACKAGES if x not in find_installed())
        peers = tuple(x for x in peers if x.removesuffix(DETERMINISTIC) not in absent)
    plan = Plan(
        shapes,
        peers if args.peers is None else args.peers,
        args.phases or passes,
        args.l2 or states,
        args.seconds,
        for_masks=("flex",) if args.shapes == "corners" and args.peers is None else (),
    )
    device = torch.device("cuda", torch.cuda.current_device())
    options = {
        "shapes": args.shapes,
        "peers": list(plan.peers),
        "phases": list(plan.passes),
        "l2": list(plan.states),
        "seconds": plan.seconds,
    }
    report = Report(describe_machine(device), options)
    if not args.quiet:
        seconds = estimate_seconds(plan, report.machine["sm_count"])
        complain(announce(plan, say_duration(seconds), absent))
    rows = partial(measure, plan, device, GpuClock(device))
    return follow(plan, report, rows, args.json, quiet=args.quiet)


def announce(plan: Plan, duration: str, absent: tuple[str, ...]) -> str:
    """Return a text: what will be measured, how long it takes, which baselines are missing."""
    rows = count(len(plan.shapes) * len(plan.states), "row")
    names = ", ".join(add_ours(plan.peers))
    missing = f"\nskipped, because not installed: {', '.join(absent)}" if absent else ""
    return f"{rows}, {', '.join(plan.passes)}; {names}: {duration}{missing}"


def follow(
    plan: Plan,
    report: Report,
    measure: Callable[[Tell], Iterator[Row]],
    path: Path | None,
    *,
    quiet: bool = False,
) -> Report:
    """Measure row by row, show progress, and save the results after each row if there is a path."""
    from .runner import ContextLostError  # noqa: PLC0415

    expected = len(plan.states) * sum(bool(plan.passes_of(x)) for x in plan.shapes)
    save(report, path)  # fail now if the path cannot be written
    with watch(expected, quiet=quiet) as (tell, advance):
        try:
            for row in measure(tell):
                report = replace(report, rows=(*report.rows, row))
                save(report, path)
                advance(row)
            report = replace(report, complete=True)
        except ContextLostError as error:
            report = replace(report, aborted=str(error))
    save(report, path)
    return report


def save(report: Report | CallReport, path: Path | None) -> None:
    """Write the results so far as JSON, if there is a path."""
    if path is not None:
        write_json(report.to_json(), path)
