"""`python -m my_kernels doctor`, `inspect`, `select` and so on."""

import sys

from ._toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
