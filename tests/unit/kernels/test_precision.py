"""The choice of float32_precision, with its scope."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flash_dist
from flash_dist.kernels.choices import float32_precision, is_ieee

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _by_default() -> Iterator[None]:
    with float32_precision("tf32x3"):
        yield


def in_a_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_it_is_a_name_of_the_package() -> None:
    assert flash_dist.float32_precision is float32_precision


def test_a_call_chooses_from_there_on() -> None:
    assert not is_ieee(None)
    float32_precision("ieee")
    assert is_ieee(None)
    float32_precision("tf32x3")
    assert not is_ieee(None)


def test_a_block_chooses_until_its_end() -> None:
    with float32_precision("ieee"):
        assert is_ieee(None)
        with float32_precision("tf32x3"):
            assert not is_ieee(None)
        assert is_ieee(None)
    assert not is_ieee(None)


def test_a_block_left_by_an_error_chooses_nothing_for_those_after_it() -> None:
    error = RuntimeError("of the test")
    with pytest.raises(RuntimeError, match="of the test"), float32_precision("ieee"):
        raise error
    assert not is_ieee(None)


def test_a_choice_may_be_kept_and_used_for_many_blocks() -> None:
    exact = float32_precision("ieee")
    for _ in range(2):
        float32_precision("tf32x3")
        with exact:
            assert is_ieee(None)
        assert not is_ieee(None)


def test_an_argument_goes_before_what_is_chosen() -> None:
    assert is_ieee("ieee")
    with float32_precision("ieee"):
        assert not is_ieee("tf32x3")


def test_a_thread_that_chose_nothing_takes_the_choice_of_the_main_thread() -> None:
    assert in_a_thread(lambda: is_ieee(None)) is False
    with float32_precision("ieee"):
        assert in_a_thread(lambda: is_ieee(None)) is True


def test_the_choice_of_a_thread_is_no_other_threads() -> None:
    def choose() -> list[bool]:
        seen = []
        with float32_precision("ieee"):
            seen += [is_ieee(None), bool(in_a_thread(lambda: is_ieee(None)))]
        seen.append(is_ieee(None))
        float32_precision("ieee")
        return [*seen, is_ieee(None)]

    assert in_a_thread(choose) == [True, False, False, True]
    assert not is_ieee(None)


def test_a_thread_that_left_its_block_takes_the_choice_of_the_main_thread_again() -> None:
    with ThreadPoolExecutor(1) as pool:

        def block() -> None:
            with float32_precision("tf32x3"):
                assert not is_ieee(None)

        pool.submit(block).result()
        with float32_precision("ieee"):
            assert pool.submit(is_ieee, None).result()


@pytest.mark.parametrize("value", ["highest", "IEEE", ""], ids=repr)
def test_another_name_is_refused_with_the_names_there_are(value: Any) -> None:  # noqa: ANN401
    for choose in (float32_precision, is_ieee):
        with pytest.raises(ValueError, match=f'"tf32x3" or "ieee", got "{value}"\n\nhint: '):
            choose(value)
    assert not is_ieee(None)


@pytest.mark.parametrize("value", [True, 32, torch.float32], ids=repr)
def test_what_is_no_name_is_refused_as_such(value: Any) -> None:  # noqa: ANN401
    for choose in (float32_precision, is_ieee):
        with pytest.raises(TypeError, match=f"got {type(value).__name__}"):
            choose(value)


@pytest.mark.slow
def test_a_compiled_function_is_compiled_again_for_another_choice() -> None:
    def tell(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if is_ieee(None) else x - 1

    compiled: Any = torch.compile(tell, backend="eager", fullgraph=True)
    zero = torch.zeros(())
    results = [float(compiled(zero))]
    with float32_precision("ieee"):
        results += [float(compiled(zero)), float(str(in_a_thread(lambda: float(compiled(zero)))))]
    results.append(float(compiled(zero)))
    assert results == [-1, 1, 1, -1]


@pytest.mark.slow
def test_a_block_may_stand_inside_of_a_compiled_function() -> None:
    def tell(x: torch.Tensor) -> torch.Tensor:
        with float32_precision("ieee"):
            inside = x + 1 if is_ieee(None) else x - 1
        return 10 * inside + (x + 1 if is_ieee(None) else x - 1)

    compiled: Any = torch.compile(tell, backend="eager", fullgraph=True)
    assert float(compiled(torch.zeros(()))) == 10 - 1
    assert not is_ieee(None)
