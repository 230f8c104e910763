"""`select`: chooses the arch set that serves all GPUs, and prints how to install it."""

from __future__ import annotations

import json
import platform
import re
from typing import TYPE_CHECKING, Any

from ..builds.published import MACHINES, known_sets, published_sets
from ..checks.gpus import describe_gpu
from ..errors import UsageError
from ..findings.result import EXIT_FINDINGS, EXIT_FINE, EXIT_NOTHING_CHECKED
from ..indexes.candidates import Offer, read_offer
from ..indexes.index import read_index
from ..indexes.install_commands import find_commands
from ..indexes.selection import candidates_of, describe_lack, select
from ..machine.libcuda import imagine_cuda, read_cuda
from ..product import NAME, PROGRAM
from ..targets.advice import arm_note, code_fix, describe_archs, describe_how, name_driver
from ..targets.archs import DEFAULT_MACHINE
from ..targets.devices import toolkit_driver
from ..targets.index_address import INDEX, explain_placeholder
from ..targets.verdict import FLOOR, Build
from ..targets.wording import format_size
from ..version import read_version
from .options import add_imagined, add_json, add_subcommand, parse_place
from .terminal.folding import paint
from .terminal.progress import working
from .terminal.results import make_console
from .terminal.text import complain, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from ..indexes.index import Index
    from ..indexes.install_commands import Command
    from ..indexes.selection import Candidate, Judged, Selection
    from ..machine.libcuda import Cuda, Gpu
    from ..targets.archs import ArchSet
    from .options import Subparsers

EPILOG = f"""\
examples:
  {PROGRAM} select
  {PROGRAM} select --gpu 8.6,9.0 --driver 580
  {PROGRAM} select --gpu 12.0 --index dist/

exit status: 0 one set serves all GPUs, 1 none does, 2 wrong usage or unreadable, 3 no GPU to
choose for
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "select",
        summary="name the smallest arch set for all GPUs, and the command that installs it",
        description="Name the one arch set that serves all GPUs of this machine, or of a list, "
        "and the commands that install it. Of several sets it is the one with machine code for "
        "the most GPUs, then with native code for the most, then the smallest.",
        epilog=EPILOG,
    )
    add_imagined(
        parser,
        gpu="for these GPUs, such as 8.6,9.0 or 'RTX 3090,h200', instead of those of this machine",
        driver="for this driver, such as 580",
    )
    parser.add_argument(
        "--machine",
        choices=MACHINES,
        help="for CPUs of this kind, with --gpu; instead of this machine's",
    )
    parser.add_argument(
        "--python",
        type=parse_python,
        metavar="V",
        help="among wheels of an index those for this Python, such as 3.12; instead of this one",
    )
    parser.add_argument(
        "--index",
        metavar="PLACE",
        type=parse_place,
        help="choose among the wheels of a folder or a package index (http, https, file) instead "
        "of the published sets",
    )
    add_json(parser, "select")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Choose an arch set, print it with its install commands, and return the exit code."""
    cuda = imagine_cuda(args.gpu, args.driver) if args.gpu else read_cuda()
    driver = args.driver or cuda.driver
    index, offer = _read_offer(args)
    selection = select((gpu.device for gpu in cuda.gpus), driver, offer.candidates)
    chosen = selection.chosen
    version = read_version()
    release = Build(f"{NAME} {version}", ()).release
    told = {"release": release, "installed": version}
    commands = find_commands(chosen.candidate, index, **told) if chosen else ()
    code = EXIT_FINE if selection else EXIT_FINDINGS
    code = code if cuda.gpus else EXIT_NOTHING_CHECKED
    for problem in offer.problems:
        complain(f"warning: {printable(problem)}")
    if args.json:
        data = _to_json(args, cuda, selection, commands, code)
        print(json.dumps({**data, "problems": list(offer.problems)}, indent=2))
    elif not cuda.gpus:
        reason = f" ({cuda.reason})" if cuda.reason else ""
        complain(f"error: {printable(f'no GPU here to choose for{reason}')}")
        complain(f"\nhint: `{PROGRAM} select --gpu 8.6,9.0` chooses for other GPUs")
    else:
        console = make_console()
        for line in describe(cuda, selection, commands, args):
            console.print(paint(line, fix=True), soft_wrap=True)  # commands stay on one line
    return code


def _read_offer(args: argparse.Namespace) -> tuple[Index | None, Offer]:
    """Return the named index, if any, and the sets to choose from."""
    if args.index is None and args.python:
        message = f"--python is for the wheels of an --index, which is not given, got {args.python}"
        raise UsageError(message, hint="`--index dist/` chooses among the wheels of a folder")
    if args.index is None:
        return None, Offer(candidates_of(published_sets(), _machine(args)))
    with working(f"reading {args.index}"):
        index = read_index(args.index)
        if not index.wheels:
            index = _read_other(args.index)
        here = not (args.gpu or args.python)
        return index, read_offer(index, machine=_machine(args), python=_python(args), here=here)


def _read_other(place: str) -> Index:
    """Read the wheels of another project at a path or address; all must belong to one project.

    Raises:
        UsageError: There are no wheels, or they belong to several projects.
    """
    index = read_index(place, None)
    projects = sorted({wheel.project for wheel in index.wheels})
    if len(projects) == 1:
        return index
    found = f", but of {', '.join(projects[:5])}" if projects else ""
    message = f"there is no wheel of {NAME} in `{place}`{found}"
    raise UsageError(message, hint="name the folder or the index that holds the wheels")


def _python(args: argparse.Namespace) -> str:
    return args.python or platform.python_version()


def parse_python(text: str) -> str:
    """Parse the version of a Python: `3.12` or `3.12.1`."""
    if re.fullmatch(r"3\.[0-9]{1,3}(\.[0-9]{1,3})?", text) is None:
        message = f"a Python is a version such as 3.12, got `{text:.60}`"
        raise UsageError(message, hint="`--python 3.12` chooses among the wheels for it")
    return text


def _machine(args: argparse.Namespace) -> str:
    """Return the requested CPU, else this machine's if sets exist for it, else the default."""
    here = platform.machine()
    return args.machine or (here if here in MACHINES else DEFAULT_MACHINE)


def describe(
    cuda: Cuda, selection: Selection, commands: tuple[Command, ...], args: argparse.Namespace
) -> Iterator[str]:
    """Yield lines: the set, how it serves each GPU, what smaller sets lack, install commands.

    If no set serves all GPUs, say why.
    """
    if selection.chosen is None:
        machine = _machine(args)
        sets = tuple(one for one in known_sets() if one.machine == machine)
        yield from _describe_failure(selection, args.index, sets)
    elif not args.quiet:
        yield from _describe_choice(selection.chosen, cuda)
        others = selection.candidates[1:] if args.verbose else selection.smaller
        yield from _describe_others(others, selection, "other" if args.verbose else "smaller")
        if args.index and args.gpu and not args.python:
            yield f"for Python {platform.python_version()}, as here: `--python` names another"
        if args.gpu and (note := arm_note(selection.devices, _machine(args), known_sets())):
            yield note
        named = args.index is None and any(INDEX in command.line for command in commands)
        if named and (note := explain_placeholder()):
            yield note
        yield ""
    yield from (f"{command.tool:<7} {command.line}" for command in commands)


def _describe_choice(chosen: Judged, cuda: Cuda) -> Iterator[str]:
    yield _name(chosen.candidate)
    verdicts = {one.situation.device: one for one in chosen.verdicts}
    groups: dict[str, list[Gpu]] = {}
    for gpu in cuda.gpus:
        groups.setdefault(describe_gpu(gpu), []).append(gpu)
    for name, gpus in groups.items():
        verdict = verdicts.get(gpus[0].device)
        how = describe_how(verdict) if verdict else f"no build serves it: they start at {FLOOR}"
        number = f"{len(gpus)} x " if len(gpus) > 1 else ""
        yield f"  {number}{name}: {how}"


def _describe_others(others: Sequence[Judged], selection: Selection, kind: str) -> Iterator[str]:
    if others:
        yield f"{kind} sets:"
    for judged in others:
        lack = describe_lack(judged, selection.chosen)
        yield f"  {_name(judged.candidate)}: {lack or _describe_equal(judged, selection.chosen)}"


def _describe_equal(judged: Judged, chosen: Judged | None) -> str:
    """Say that a set serves the GPUs equally well; for another toolkit, also name its driver."""
    toolkit = judged.candidate.build.toolkit
    if toolkit is None or chosen is None or chosen.candidate.build.toolkit == toolkit:
        return "serves them as well"
    return f"serves them as well, from driver {toolkit_driver(toolkit)} on"


def _describe_failure(
    selection: Selection, place: str | None, sets: tuple[ArchSet, ...]
) -> Iterator[str]:
    devices = selection.devices
    for device in selection.unservable:
        yield f"no build serves compute capability {device}: they start at {FLOOR}"
    if not devices:
        return
    kind = f"wheel in `{place}`" if place else "published arch set"
    whom = f"{'all of ' if len(devices) > 1 else ''}{', '.join(map(str, devices))}"
    refusal = selection.driver_refusal
    if refusal and selection.held_back is not None:
        yield f"no {kind} serves {whom}: {refusal}"
        newer = name_driver(selection.needed, (*selection.unservable, *devices))
        yield f"  fix: install {newer} (`nvidia-smi` shows the present one)"
        return
    yield f"no {kind} serves {whom}"
    build = Build(f"{NAME} {read_version()}", (), sets)
    yield f"  fix: {code_fix((*selection.unservable, *devices), build, selection.driver)}"
    yield from _describe_others(selection.candidates, selection, "other")


def _name(candidate: Candidate) -> str:
    """Name a set and its contents: `hopper 0.1.0+cu130.hopper: SASS sm_90a; no PTX, 1.7 MB`."""
    version = f" {candidate.version}" if candidate.version else ""
    size = f", {format_size(candidate.size)}" if candidate.size else ""
    return f"{candidate.name}{version}: {describe_archs(candidate.archs)}{size}"


def _to_json(
    args: argparse.Namespace,
    cuda: Cuda,
    selection: Selection,
    commands: tuple[Command, ...],
    code: int,
) -> dict[str, Any]:
    return {
        "version": 1,
        "command": "select",
        "exit_code": code,
        "what_if": bool(args.gpu),
        "cuda": cuda.to_json(),
        "index": args.index,
        "python": _python(args) if args.index else None,
        "chosen": selection.chosen.to_json() if selection.chosen else None,
        "candidates": [judged.to_json() for judged in selection.candidates],
        "unservable": [str(device) for device in selection.unservable],
        "commands": [command.to_json() for command in commands],
    }
