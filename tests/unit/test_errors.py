"""The base error: its general name in the toolkit, and its public name in flash_dist."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback

from flash_dist import errors
from flash_dist.errors import FlashDistError, UsageError
from flash_dist.toolkit.errors import KernelsError


def test_the_public_class_is_that_of_the_toolkit() -> None:
    assert FlashDistError is KernelsError
    assert all(issubclass(getattr(errors, name), FlashDistError) for name in errors.__all__)


def test_a_traceback_has_the_public_name() -> None:
    told = traceback.format_exception_only(FlashDistError("no", hint="yes"))
    assert "".join(told) == "flash_dist.errors.FlashDistError: no\n\nhint: yes\n"


def test_a_traceback_of_the_toolkit_alone_has_no_name_of_a_package() -> None:
    code = "from flash_dist.toolkit.errors import KernelsError; raise KernelsError('no')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "flash_dist.toolkit.errors.KernelsError: no"


def test_errors_are_pickled_with_their_hints() -> None:
    for error in (FlashDistError("no", hint="yes"), UsageError("no", hint="yes")):
        read = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
        assert type(read) is type(error)
        assert (read.message, read.hint) == ("no", "yes")
