"""Entry point for tools that run setup.py; pip and uv call the build backend in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from flash_dist.toolkit.make.building.pack import main

main()
