"""Runs every mask test with each possible default device of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.default_device import default_device

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICES = ("cpu", "meta", "cuda") if torch.cuda.is_available() else ("cpu", "meta")


@pytest.fixture(autouse=True, params=DEVICES, ids=[f"default-{name}" for name in DEVICES])
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "cpu":
        yield
        return
    with default_device(request.param):
        yield
