"""The options of doctor, what they may say, and which of them go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..checks.environment import VARIABLES
from ..doctor.examine import check_names
from ..errors import UsageError, wrong_usage
from ..selftest.run import DEFAULT_RUNS
from ..targets.devices import Device, Driver
from .report_page import add_report_option
from .selftest import parse_runs

if TYPE_CHECKING:
    import argparse

BACKENDS: Final = ("gloo", "nccl")
LAUNCHER: Final = "torchrun --nproc-per-node=gpu -m flash_dist doctor --fleet"

# What each way of asking understands, beside --json, -v and -q; the first that is given decides.
_MACHINE = ("strict", "no_selftest", "only", "skip", "devices", "report")
_MODES: dict[str, tuple[str, ...]] = {
    "explain": (),
    "fleet": ("runs", "rounds", "backend", "strict"),
    "package": ("wheel", "gpu", "driver", "env", "devices", "strict", "report", "no_selftest"),
    "wheel": ("package", "gpu", "driver", "env", "devices", "strict", "report", "no_selftest"),
    "gpu": ("driver", "env", *_MACHINE),
}
_NEEDED: dict[str, tuple[str, str]] = {  # by what makes no sense alone
    "driver": ("gpu", "`doctor --gpu 8.6 --driver 580` judges a GPU that is not here"),
    "env": ("gpu", "`doctor --gpu 8.6 --env CUDA_FORCE_PTX_JIT=1` judges a GPU that is not here"),
    "rounds": ("fleet", f"`{LAUNCHER} --rounds 10`"),
    "backend": ("fleet", f"`{LAUNCHER} --backend nccl`"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the options of doctor."""
    parser.add_argument("--json", action="store_true", help="print JSON (docs/schema/doctor.json)")
    parser.add_argument("--strict", action="store_true", help="warnings count as failures")
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
        help="run these checks alone: " + ", ".join(check_names()),
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
        help="judge and test these GPUs alone, such as 0,2 in CUDA's order",
    )
    parser.add_argument(
        "--gpu",
        type=parse_devices,
        metavar="LIST",
        help="what if: judge GPUs of these compute capabilities, such as 7.5,8.6",
    )
    parser.add_argument(
        "--driver", type=parse_driver, metavar="V", help="what if: with this driver, such as 535"
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
        help="judge all libraries of an installed distribution instead of this one's kernels",
    )
    parser.add_argument(
        "--wheel",
        metavar="PLACE",
        action="append",
        default=[],
        help="judge a wheel, library or folder before it is installed, ours or anybody's: a path "
        "or address, or an index page, of which it takes the wheel that fits best",
    )
    add_report_option(parser)
    parser.add_argument(
        "--explain",
        metavar="TEXT",
        help="say what an error message about GPU code, or the id of a finding, means",
    )
    parser.add_argument(
        "--runs",
        type=parse_runs,
        metavar="N",
        help=f"runs per case of the selftest (default: {DEFAULT_RUNS})",
    )
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="under torchrun: prove the GPU of every rank, and that all compute the same bits",
    )
    parser.add_argument(
        "--rounds",
        type=parse_rounds,
        metavar="N",
        help="with --fleet: how often, for a burn-in (default: 1)",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help=f"with --fleet: what carries the fingerprints (default: {BACKENDS[0]})",
    )


def parse_rounds(text: str) -> int:
    """Read a number of rounds."""
    if not text.isdecimal() or not int(text):
        message = f"rounds must be a number of at least 1, got `{text}`"
        raise UsageError(message, hint="`--rounds 10` repeats the selftest ten times")
    return int(text)


def parse_names(text: str) -> frozenset[str]:
    """Read `driver,gpu`."""
    return frozenset(name.strip() for name in text.split(","))


def parse_indices(text: str) -> tuple[int, ...]:
    """Read `0,2`."""
    names = [name.strip() for name in text.split(",")]
    if not all(name.isascii() and name.isdecimal() for name in names):
        message = f"devices are numbers such as `0,2`, got `{text}`"
        raise UsageError(message, hint="`python -m flash_dist doctor` lists the GPUs")
    return tuple(sorted(set(map(int, names))))


def parse_devices(text: str) -> tuple[Device, ...]:
    """Read `7.5,8.6`."""
    with wrong_usage():
        return tuple(Device.parse(one) for one in text.split(","))


def parse_driver(text: str) -> Driver:
    """Read `535` or `580.65.06`."""
    with wrong_usage():
        return Driver.parse(text)


def parse_variable(text: str) -> tuple[str, str]:
    """Read `CUDA_FORCE_PTX_JIT=1`."""
    name, equals, value = text.partition("=")
    if not equals or name not in VARIABLES:
        message = f"--env must be NAME=VALUE with a NAME that is judged, got `{text}`"
        raise UsageError(message, hint=f"the names are {', '.join(VARIABLES)}")
    return name, value


def require_fitting(args: argparse.Namespace) -> None:
    """Refuse an option that would be ignored beside another, or without it.

    Raises:
        UsageError: Naming both.
    """
    known = {*_MACHINE, *_MODES, *_NEEDED, "runs"}
    given = [name for name, value in vars(args).items() if name in known and value]
    if args.explain is not None and "explain" not in given:
        given.append("explain")  # which may be empty
    for name in given:
        needed, hint = _NEEDED.get(name, (name, ""))
        if needed not in given:
            message = f"--{name} is for --{needed}, which is not given"
            raise UsageError(message, hint=hint)
    for mode in [mode for mode in _MODES if mode in given][:1]:
        strange = [name for name in given if name not in {mode, *_MODES[mode]}]
        if strange:
            flag = f"--{strange[0].replace('_', '-')}"
            message = f"{flag} says nothing to --{mode}, got both"
            raise UsageError(message, hint=f"leave out {flag} or --{mode}")
