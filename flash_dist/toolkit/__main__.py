"""Entry point of a standalone toolkit: `python -m`, and its console script."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and end the process."""
    try:
        from .cli import main as run  # noqa: PLC0415 - the import reports errors in pyproject.toml
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.exit(run())


if __name__ == "__main__":
    main()
