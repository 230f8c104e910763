"""Options that several subcommands share, and parsers of their values."""

from __future__ import annotations

import argparse
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError, wrong_usage
from ..indexes.credentials import without_credentials
from ..product import PROGRAM
from ..targets.devices import Driver
from ..targets.products import find_device
from ..targets.wording import read_whole
from .terminal.text import spell

if TYPE_CHECKING:
    from ..targets.devices import Device

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the class has no public name

_HELP_WIDTH = 80


def add_subcommand(
    subparsers: Subparsers, name: str, *, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Add a subcommand whose epilog (examples, exit status) keeps its line breaks.

    Each subcommand has -v and -q, and decides how these options change its output.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _HELP_WIDTH),
        epilog=spell(epilog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "-v", "--verbose", action="store_true", help="print every detail, and a log on stderr"
    )
    amount.add_argument(
        "-q", "--quiet", action="store_true", help="print warnings, failures and the last line only"
    )
    return parser


def add_json(parser: argparse.ArgumentParser, schema: str, *, each: str = "") -> None:
    """Add `--json`.

    Args:
        parser: Parser of the subcommand.
        schema: File name of the schema in docs/schema.
        each: Name of an item, if the output has one line for each item. Empty: one document.
    """
    lines = f", one line per {each}" if each else ""
    help_text = f"print JSON{lines} (docs/schema/{schema}.json)"
    parser.add_argument("--json", action="store_true", help=help_text)


def add_strict(parser: argparse.ArgumentParser) -> None:
    """Add `--strict`."""
    parser.add_argument("--strict", action="store_true", help="warnings count as failures")


def add_runs(parser: argparse.ArgumentParser, usual: int) -> None:
    """Add `--runs`, a number of at least two. Its value is None if the option is not given."""
    hint = f"`--runs {usual}` is the default"
    parser.add_argument(
        "--runs",
        type=partial(parse_number, what="runs", least=2, hint=hint),
        metavar="N",
        help=f"runs per case of the selftest (default: {usual})",
    )


def add_imagined(parser: argparse.ArgumentParser, *, gpu: str, driver: str) -> None:
    """Add `--gpu` and `--driver`, which describe an imagined machine.

    Args:
        parser: Parser of the subcommand.
        gpu: Help text of `--gpu`.
        driver: Help text of `--driver`.
    """
    parser.add_argument("--gpu", type=parse_devices, metavar="LIST", help=gpu)
    parser.add_argument("--driver", type=parse_driver, metavar="V", help=driver)


def parse_path(text: str) -> Path:
    """Read a path. Reject an empty path, which would mean the current folder."""
    if not text:
        message = "a path must name a file or folder, got an empty one"
        raise UsageError(message, hint="`.` is the current folder")
    return Path(text)


def parse_place(text: str) -> str:
    """Read a path or an address. Credentials are removed, and kept for requests to its server."""
    if not text:
        message = "a place must be a path or an address, got an empty one"
        raise UsageError(message, hint="`.` is the current folder")
    return without_credentials(text)


def parse_number(text: str, *, what: str, least: int, hint: str) -> int:
    """Parse a whole number of at least `least`.

    Raises:
        UsageError: The text is not such a number.
    """
    number = read_whole(text, least=least)
    if number is None:
        message = f"{what} must be a number of at least {least}, got `{text:.60}`"
        raise UsageError(message, hint=hint)
    return number


def parse_indices(text: str) -> tuple[int, ...]:
    """Parse device numbers such as `0,2`."""
    numbers = {read_whole(name.strip()) for name in text.split(",")}
    if None in numbers:
        message = f"devices are numbers such as `0,2`, got `{text:.60}`"
        raise UsageError(message, hint=f"`{PROGRAM} doctor` lists the GPUs")
    return tuple(sorted(number for number in numbers if number is not None))


def parse_devices(text: str) -> tuple[Device, ...]:
    """Parse a list of GPUs: `7.5,8.6`, `sm_86` or `RTX 3090,h200`."""
    with wrong_usage():
        return tuple(find_device(one) for one in text.split(","))


def parse_driver(text: str) -> Driver:
    """Parse the version of a driver: `535` or `580.65.06`."""
    with wrong_usage():
        return Driver.parse(text)
