"""Makes commands print an expected error as a sentence on stderr, and exit with status 1.

After Ctrl-C, a command prints one word and ends with status 130, as most programs do.
"""

from __future__ import annotations

import functools
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec

from ..cli.terminal.signals import Terminated, raising_signals
from ..errors import KernelsError, explain_os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Words = ParamSpec("Words")


def complain(error: object) -> None:
    """Print an error on stderr."""
    print(_tell(error), file=sys.stderr, flush=True)


def command(main: Callable[Words, int]) -> Callable[Words, int]:
    """Make a command print an expected error and return 1; return 128 + N after signal N."""

    @functools.wraps(main)
    def run(*args: Words.args, **options: Words.kwargs) -> int:
        try:
            with raising_signals():
                return main(*args, **options)
        except Terminated as ended:
            return 128 + ended.signal
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            return 128 + signal.SIGINT
        except KernelsError as error:
            complain(error)
        except OSError as error:  # such as a full disk
            complain(explain_os_error(error))
        return 1

    return run


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """On an expected error, print its message and exit: for hooks of pip and setuptools."""
    try:
        yield
    except KernelsError as error:
        sys.exit(_tell(error))
    except OSError as error:
        sys.exit(_tell(explain_os_error(error)))


def _tell(error: object) -> str:
    return f"error: {error}"
