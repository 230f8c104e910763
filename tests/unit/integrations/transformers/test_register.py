"""register() needs two classes of transformers, and reports missing parts."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from flash_dist.errors import FlashDistError
from flash_dist.integrations import transformers as integration

if TYPE_CHECKING:
    from collections.abc import Callable


class Interface:
    """Stub of the two interfaces of transformers: functions by name."""

    def __init__(self) -> None:
        self.known: dict[str, Callable[..., object]] = {}

    def register(self, name: str, function: Callable[..., object]) -> None:
        self.known[name] = function


def fake(monkeypatch: pytest.MonkeyPatch, **names: object) -> None:
    package = ModuleType("transformers")
    package.__dict__.update(names)
    monkeypatch.setitem(sys.modules, "transformers", package)


def test_the_name_is_none_that_transformers_takes_for_another_package() -> None:
    for taken in ("flash", "sdpa", "flex", "eager", "paged", "/", "|"):
        assert taken not in integration.NAME


def test_both_functions_are_registered_under_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, mask = Interface(), Interface()
    fake(monkeypatch, AttentionInterface=attention, AttentionMaskInterface=mask)
    module = ModuleType("attention")
    module.__dict__["attention_forward"] = print  # the real function loads the extension
    monkeypatch.setitem(sys.modules, f"{integration.__name__}.attention", module)
    assert integration.register() == integration.NAME
    assert integration.register() == integration.NAME
    assert attention.known == {integration.NAME: print}
    assert list(mask.known) == [integration.NAME]
    assert mask.known[integration.NAME].__name__ == "make_mask"


def test_transformers_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FlashDistError, match="needs transformers") as caught:
        integration.register()
    assert "pip install" in str(caught.value.hint)


def test_transformers_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, __version__="4.40.1")
    with pytest.raises(FlashDistError, match=r"at least 4\.57, got 4\.40\.1"):
        integration.register()
