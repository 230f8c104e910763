"""One thread for torch: on small tensors several wait for each other, longest on a busy host."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; children inherit it
