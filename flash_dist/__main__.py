"""`python -m flash_dist`."""

from __future__ import annotations

import sys

from flash_dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
