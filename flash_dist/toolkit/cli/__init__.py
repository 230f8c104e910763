"""The command line, `python -m NAME SUBCOMMAND` or the console script: one file per subcommand.

Data goes to stdout, messages to stderr. Exit status: 0 no failure, 1 at least one failure, 2 wrong
usage or unreadable input, 3 nothing could be checked; 130 interrupted, 141 the reader closed the
pipe, 129 or 143 ended by SIGHUP or SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from ..binaries.budget import one_command
from ..errors import KernelsError, UsageError
from ..findings.result import EXIT_FINE, EXIT_UNUSABLE
from ..product import NAME, PRODUCT, PROGRAM
from ..version import read_version
from .requirements import explain_import
from .terminal.signals import Terminated, raising_signals
from .terminal.text import (
    complain,
    discard,
    escape_unknown,
    logging_to_stderr,
    printable,
    printable_error,
    spell,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SUBCOMMANDS = (
    *("inspect", "doctor", "explain", "selftest", "fleet", "audit", "verify", "select"),
    *PRODUCT.subcommands,
)

EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

_NO_FILES = {errno.EMFILE, errno.ENFILE}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    try:
        with raising_signals():
            return _run(argv)
    except (KernelsError, ImportError) as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Terminated as ended:
        return 128 + ended.signal
    except BrokenPipeError:
        discard(sys.stdout)
        return EXIT_CLOSED_PIPE
    except OSError as error:  # such as a full disk
        nowhere = error.errno == errno.ENOENT  # no folder for temporary files
        where = "a temporary file" if nowhere else "the output"
        where = f"`{error.filename}`" if error.filename else where
        what = "open another file" if error.errno in _NO_FILES else f"write {printable(where)}"
        complain(f"error: cannot {what}: {error.strerror or error}")
        discard(sys.stdout)
        return EXIT_UNUSABLE


def _refuse(error: KernelsError | ImportError) -> int:
    explained = explain_import(error) if isinstance(error, ImportError) else error
    if explained is None:
        raise error
    complain(f"error: {printable_error(explained)}")
    return EXIT_UNUSABLE


def _run(argv: Sequence[str] | None) -> int:
    if sys.stdout is None:
        message = "stdout is closed"
        raise UsageError(message, hint="`>/dev/null` discards the output")
    escape_unknown(sys.stdout)
    try:
        given = expand_alias(sys.argv[1:] if argv is None else argv)
        if not given:
            make_parser().print_help()
            return EXIT_FINE
        _require_subcommand(given)
        named = tuple(name for name in SUBCOMMANDS if given[:1] == [name])
        args, unknown = make_parser(named or SUBCOMMANDS).parse_known_args(given)
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            asked = " ".join((PROGRAM, *named))
            raise UsageError(message, hint=f"`{asked} --help` shows what is understood")
        with logging_to_stderr(verbose=args.verbose), one_command():
            return int(args.run(args))
    finally:
        sys.stdout.flush()  # also after --help, which raises SystemExit


def expand_alias(given: Sequence[str]) -> list[str]:
    """Replace the older forms `doctor --explain TEXT` and `doctor --fleet` with the subcommands."""
    name, rest = list(given[:1]), list(given[1:])
    for place, word in enumerate(rest if name == ["doctor"] else ()):
        before, after = rest[:place], rest[place + 1 :]
        if word == "--fleet":
            return ["fleet", *before, *after]
        if word == "--explain":
            return ["explain", *before, *after[1:], "--", *after[:1]]
        if word.startswith("--explain="):
            return ["explain", *before, *after, "--", word.partition("=")[2]]
    return [*name, *rest]


def _require_subcommand(given: Sequence[str]) -> None:
    """Reject an unknown subcommand, and suggest the nearest one."""
    name = given[0]
    if name in SUBCOMMANDS or name.startswith("-"):
        return
    listed = f"{', '.join(SUBCOMMANDS[:-1])} or {SUBCOMMANDS[-1]}"
    message = f"the subcommand must be {listed}, got `{name}`"
    near = get_close_matches(name, SUBCOMMANDS, 1)
    meant = f"did you mean `{near[0]}`?" if near else f"`{PROGRAM} --help` says what each does"
    raise UsageError(message, hint=meant)


class Parser(argparse.ArgumentParser):
    """Parser that reports wrong usage in the form of all other errors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing; `main` prints."""
        raise UsageError(message, hint=f"`{self.prog} --help` shows what is understood")


def make_parser(names: Sequence[str] = SUBCOMMANDS) -> Parser:
    """Return a parser for these subcommands; import only their modules."""
    parser = Parser(prog=spell(PROGRAM), description=PRODUCT.summary)
    parser.add_argument("--version", action="version", version=f"{NAME} {read_version()}")
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for name in names:
        load_subcommand(name).add_parser(subparsers)
    return parser


def load_subcommand(name: str) -> Any:  # noqa: ANN401 - a module
    """Return the module of a subcommand, from the toolkit or from the package."""
    if name in PRODUCT.subcommands:
        return PRODUCT.load(PRODUCT.subcommands[name])
    return importlib.import_module(f".{name}", __package__)
