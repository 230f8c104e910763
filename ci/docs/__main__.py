"""Command line: `python -m ci.docs FOLDER`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from flash_dist.errors import FlashDistError
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import ROOT

from .checks import NOT_CHECKED, check_pages, check_site, find_chromium
from .search import write_index
from .sources import collect


@command
def main() -> int:
    """Build the site into a folder and check it."""
    out = Path(sys.argv[1]).resolve()
    run_sphinx(out)
    write_index(out)
    report(list(check_site(out)))
    chromium = find_chromium()
    if chromium:
        report(list(check_pages(out, chromium)))
    elif os.environ.get("CI"):
        report([NOT_CHECKED])
    else:
        print(NOT_CHECKED)
    return 0


def run_sphinx(out: Path) -> None:
    """Collect the sources and let Sphinx make a page of each; warnings are errors."""
    source = ROOT / "build" / "docs"
    collect(source)
    shutil.rmtree(out, ignore_errors=True)
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(ROOT / "build" / "doctrees")]
    words = [sys.executable, "-m", "sphinx", *options, str(source), str(out)]
    if subprocess.run(words, cwd=ROOT, check=False).returncode:
        message = "Sphinx found the problems above"
        raise FlashDistError(message)


def report(problems: list[str]) -> None:
    """Raise an error that lists the problems, if there are any."""
    if problems:
        raise FlashDistError("\n".join(problems))


if __name__ == "__main__":
    sys.exit(main())
