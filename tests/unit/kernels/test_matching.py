"""The choice of match_kvcache; tests/wheel/test_match_kvcache.py tests its effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_dist
from flash_dist.kernels.choices import is_matching, match_kvcache
from flash_dist.masks import Band, BlockMask

if TYPE_CHECKING:
    from collections.abc import Iterator

Q = torch.zeros(1, 1, 1, 8)


@pytest.fixture(autouse=True)
def _by_default() -> Iterator[None]:
    with match_kvcache(match=False):
        yield


def is_chosen(match: Any = None) -> bool:  # noqa: ANN401
    return is_matching(match, Q, Band())


def test_it_is_a_name_of_the_package() -> None:
    assert flash_dist.match_kvcache is match_kvcache


def test_a_call_chooses_from_there_on_and_a_block_until_its_end() -> None:
    assert not is_chosen()
    match_kvcache()
    assert is_chosen()
    with match_kvcache(match=False):
        assert not is_chosen()
    assert is_chosen()


def test_a_decorated_function_chooses_in_each_call_and_nothing_before() -> None:
    @match_kvcache()
    def decorated(*, again: bool) -> bool:
        """Say what is chosen."""
        return is_chosen() and (decorated(again=False) if again else is_chosen())

    assert not is_chosen()
    assert decorated(again=True)
    assert not is_chosen()
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Say what is chosen.")
    match_kvcache()
    assert decorated(again=False)
    assert is_chosen()


async def later() -> None: ...


@pytest.mark.parametrize(
    "what", [later, lambda: (yield), object, torch.nn.Identity(), 3], ids=lambda x: str(x)[:20]
)
def test_what_runs_behind_its_call_is_not_decorated(what: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match=r"match_kvcache must decorate a function, got[\s\S]*hint"):
        match_kvcache()(what)
    assert not is_chosen()


def test_an_argument_goes_before_what_is_chosen() -> None:
    assert is_chosen(match=True)
    with match_kvcache():
        assert not is_chosen(match=False)


@pytest.mark.parametrize("value", ["yes", 1, torch.ones(())], ids=repr)
def test_what_is_no_bool_is_refused(value: Any) -> None:  # noqa: ANN401
    for choose in (match_kvcache, is_chosen):
        with pytest.raises(TypeError, match="match_kvcache must be True or False, got "):
            choose(value)


def test_float32_on_a_gpu_is_refused_where_it_is_chosen() -> None:
    with FakeTensorMode():
        q = torch.zeros(1, 1, 1, 8, device="cuda")
    assert not is_matching(None, q, Band())
    assert is_matching(True, q.bfloat16(), Band())  # noqa: FBT003
    with match_kvcache(), pytest.raises(TypeError, match="False for float32 on a GPU, got True"):
        is_matching(None, q, Band())


def test_a_mask_that_is_a_band_is_taken() -> None:
    assert is_matching(True, Q, BlockMask.sliding_window(3, 0))  # noqa: FBT003
    with pytest.raises(ValueError, match="False with this mask"):
        is_matching(True, Q, BlockMask.documents([0]))  # noqa: FBT003
