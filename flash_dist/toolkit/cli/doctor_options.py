"""Options of `doctor`: their values, and which options cannot be combined."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from ..checks.environment import WHAT_IF_VARIABLES
from ..doctor.examine import check_names
from ..errors import UsageError
from ..indexes.requirement import Pinned, read_line
from ..selftest.run import DEFAULT_RUNS
from ..targets.verdict import SMEM_VARIABLE
from .doctor_files import PIPE, add_record_options, add_report_option
from .options import add_imagined, add_json, add_runs, add_strict, parse_indices, parse_place

if TYPE_CHECKING:
    import argparse

# For each option, the options that have no effect with it, because doctor then skips the checks or
# the kernels that these options are for.
_SILENT: Final = {
    "package": ("only", "skip", "runs", "save", "load"),
    "wheel": ("only", "skip", "runs", "save"),
    "gpu": ("runs",),
    "load": ("runs", "save"),
}
_ALONE: Final = {  # options that require --gpu, each with its hint
    "driver": "`doctor --gpu 8.6 --driver 580` judges a GPU that is not here",
    "env": "`doctor --gpu 8.6 --env CUDA_FORCE_PTX_JIT=1` judges a GPU that is not here",
}


class _Values(NamedTuple):
    """Valid values of a variable. A variable with an empty value counts as not set."""

    pattern: str
    words: str
    example: str


_SWITCHES: Final = (
    *("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT", "CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT"),
    "CUDA_CACHE_DISABLE",
)
_VALUES: Final = {
    **dict.fromkeys(_SWITCHES, _Values("[01]?", "0 or 1", "1")),
    "CUDA_CACHE_MAXSIZE": _Values("[0-9]*", "a number of bytes", "1073741824"),
    "CUDA_DEVICE_ORDER": _Values(
        "(FASTEST_FIRST|PCI_BUS_ID)?", "FASTEST_FIRST or PCI_BUS_ID", "PCI_BUS_ID"
    ),
    "CUDA_MODULE_LOADING": _Values("(DEFAULT|EAGER|LAZY)?", "DEFAULT, EAGER or LAZY", "LAZY"),
    SMEM_VARIABLE: _Values("0*[1-9][0-9]*|", "a number of bytes", "65536"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of doctor."""
    add_json(parser, "doctor")
    add_strict(parser)
    parser.add_argument(
        "--no-selftest",
        action="store_true",
        help="do not run the kernels, and predict whether they load",
    )
    parser.add_argument(
        "--only",
        type=parse_names,
        metavar="NAMES",
        default=frozenset(),
        help="run only these checks: " + ", ".join(check_names()),
    )
    parser.add_argument(
        "--skip",
        type=parse_names,
        metavar="NAMES",
        default=frozenset(),
        help="run all checks but these",
    )
    parser.add_argument(
        "--devices",
        type=parse_indices,
        metavar="LIST",
        help="judge and test only these GPUs, such as 0,2 in CUDA's order",
    )
    add_imagined(
        parser,
        gpu="what if: judge these GPUs, such as 7.5,8.6 or 'RTX 3090,h200'",
        driver="what if: with this driver, such as 535",
    )
    parser.add_argument(
        "--env",
        type=parse_variable,
        metavar="K=V",
        action="append",
        default=[],
        help="what if: with this environment variable, such as CUDA_FORCE_PTX_JIT=1",
    )
    parser.add_argument(
        "--package",
        metavar="NAME",
        action="append",
        default=[],
        help="judge all libraries of an installed distribution instead of this package's kernels",
    )
    parser.add_argument(
        "--wheel",
        metavar="PLACE",
        type=parse_wheel,
        action="extend",
        nargs="+",
        default=[],
        help="judge wheels, libraries or folders of any package before they are installed: paths, "
        "addresses, requirements as for pip, or index pages, from which it takes the wheel that "
        "fits best",
    )
    add_report_option(parser)
    add_record_options(parser)
    add_runs(parser, DEFAULT_RUNS)


def parse_wheel(text: str) -> str:
    """Read a path, an address, or a pip line that names a wheel. Return it without credentials."""
    found = read_line(text)
    return str(found) if isinstance(found, Pinned) else parse_place(found or text)


def parse_names(text: str) -> frozenset[str]:
    """Parse a list of names such as `driver,gpu`."""
    return frozenset(name.strip() for name in text.split(","))


def parse_variable(text: str) -> tuple[str, str]:
    """Parse a setting such as `CUDA_FORCE_PTX_JIT=1`."""
    name, equals, value = text.partition("=")
    if not equals or name not in WHAT_IF_VARIABLES:
        message = f"--env must be NAME=VALUE with a NAME that is judged, got `{text:.60}`"
        raise UsageError(message, hint=f"the names are {', '.join(WHAT_IF_VARIABLES)}")
    allowed = _VALUES.get(name)
    if allowed is not None and not re.fullmatch(allowed.pattern, value):
        message = f"{name} must be {allowed.words}, got `{value:.60}`"
        raise UsageError(message, hint=f"`--env {name}={allowed.example}`")
    return name, value


def require_fitting(args: argparse.Namespace) -> None:
    """Reject an option that needs a missing one, has no effect with another, or conflicts with it.

    Raises:
        UsageError: Two options do not fit together. The message names both.
    """
    given = {name for name, value in vars(args).items() if value}
    for name, hint in _ALONE.items():
        if name in given and "gpu" not in given:
            message = f"--{name} needs --gpu, which is not given"
            raise UsageError(message, hint=hint)
    for name, silent in _SILENT.items():
        for other in silent:
            if {name, other} <= given:
                message = f"--{other} has no effect with --{name}, got both"
                raise UsageError(message, hint=f"leave out --{other} or --{name}")
    if args.save == PIPE and args.json:
        message = "--save - and --json both write to stdout, got both"
        raise UsageError(message, hint="`--save record.json --json` gives each its own place")
