"""`python -m own_kernels`: doctor, selftest, inspect and the other subcommands of the toolkit."""

from ._toolkit.cli import main

raise SystemExit(main())
