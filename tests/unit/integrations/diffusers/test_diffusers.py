"""register() adds a name to diffusers, and reports missing parts."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.errors import FlashDistError
from flash_dist.integrations import diffusers as integration

if TYPE_CHECKING:
    from collections.abc import Callable

DISPATCH = "diffusers.models.attention_dispatch"


class Names(str, Enum):
    """Stub of diffusers' names."""

    NATIVE = "native"
    _NATIVE_FLASH = "_native_flash"


class Registry:
    """Stub of diffusers' registry: functions by members."""

    known: dict[Names, Callable[..., object]]

    @classmethod
    def register(cls, member: Names) -> Callable[[Any], Any]:
        def take(function: Any) -> Any:  # noqa: ANN401
            cls.known[member] = function
            return function

        return take


def fake(monkeypatch: pytest.MonkeyPatch, dispatch: dict[str, object] | None = None) -> None:
    package = ModuleType("diffusers")
    package.__dict__["__version__"] = "0.30.0"
    monkeypatch.setitem(sys.modules, "diffusers", package)
    if dispatch is None:
        monkeypatch.setitem(sys.modules, DISPATCH, None)
        return
    module = ModuleType(DISPATCH)
    module.__dict__.update(dispatch)
    monkeypatch.setitem(sys.modules, "diffusers.models", ModuleType("diffusers.models"))
    monkeypatch.setitem(sys.modules, DISPATCH, module)


def test_the_function_is_registered_under_a_member_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake(monkeypatch, {"AttentionBackendName": Names, "_AttentionBackendRegistry": Registry})
    monkeypatch.setattr(Registry, "known", {}, raising=False)
    module = ModuleType("attention")
    module.__dict__["attend"] = print  # the real function loads the extension
    monkeypatch.setitem(sys.modules, f"{integration.__name__}.attention", module)
    name = integration.register()
    assert name == integration.register() == integration.NAME
    member = Names(name)
    assert {member: print} == Registry.known
    assert list(Names) == [Names.NATIVE, Names._NATIVE_FLASH, member]
    assert member is Names["FDIST"] is Names.FDIST  # type: ignore[attr-defined]
    assert name in {x.value for x in Names.__members__.values()}
    assert member == name
    assert repr(member) == "<Names.FDIST: 'fdist'>"


def test_diffusers_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(FlashDistError, match="needs diffusers") as caught:
        integration.register()
    assert "pip install" in str(caught.value.hint)


@pytest.mark.parametrize("dispatch", [None, {}], ids=["no module", "no names"])
def test_diffusers_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, dispatch: dict[str, object] | None
) -> None:
    fake(monkeypatch, dispatch)
    with pytest.raises(FlashDistError, match=rf"at least {integration.OLDEST}, got 0\.30\.0"):
        integration.register()
