"""Copies a repository of `nox -s hub` for the installed torch."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path


def copy_repository(made: Path, folder: Path) -> Path:
    """Copy a repository to `folder`; for a torch without CUDA, rename its variant to a CPU variant.

    Hugging Face's loader looks only for the backend of torch.
    """
    shutil.copytree(made, folder)
    if torch.version.cuda:
        return folder
    (variant,) = (folder / "build").iterdir()
    metadata = variant / "metadata.json"
    told = json.loads(metadata.read_text())
    told["backend"] = {"type": "cpu"}
    metadata.write_text(json.dumps(told))
    variant.rename(variant.with_name("torch-stable-abi210-cpu-x86_64-linux"))
    return folder
