"""Invalid names of packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.declared.keys import DeclarationError
from flash_dist.toolkit.make.declared.names import (
    find_neighbours,
    find_owner,
    is_importable,
    read_name,
    require_namespace,
)
from tests.unit.made.projects import require_sentence, write

if TYPE_CHECKING:
    from pathlib import Path


def refuse(package: str | None, project: object) -> str:
    own = {} if package is None else {"package": package}
    with pytest.raises(DeclarationError) as caught:
        read_name(own, {"name": project})
    require_sentence(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("project", "package"),
    [
        ("my-norms", "my_norms"),
        ("My.Norms", "my_norms"),
        ("my__norms", "my_norms"),
        ("my-_.norms2", "my_norms2"),
        ("x", "x"),
        ("a" * 41, "a" * 41),
    ],
)
def test_a_package_has_the_name_of_its_project(project: str, package: str) -> None:
    assert read_name({}, {"name": project}) == package
    assert read_name({"package": package}, {"name": project}) == package


@pytest.mark.parametrize(
    ("package", "project", "said"),
    [
        ("norms", "my-norms", "is `norms`, and the project is named `my-norms`"),
        ("my_norms", "norms", "is `my_norms`, and the project is named `norms`"),
        ("MyNorms", "mynorms", "must be a name such as `my_norms`, of at most 41 characters, got"),
        ("my-norms", "my-norms", "must be a name such as `my_norms`"),
        ("my_norms_", "my-norms", "must be a name such as `my_norms`"),
        ("my__norms", "my-norms", "must be a name such as `my_norms`"),
        ("_norms", "norms", "must be a name such as `my_norms`"),
        ("1norms", "1norms", "must be a name such as `my_norms`"),
        ("my.norms", "my-norms", "must be a name such as `my_norms`"),
        ("nörms", "norms", "must be a name such as `my_norms`"),
        ("a" * 42, "a" * 42, "of at most 41 characters, got"),
        (None, "1-norms", "the package of `name` of [project] must be a name such as `my_norms`"),
        (None, "my norms", "`name` of [project] must be a name such as `my-norms`, got"),
        (None, "-norms", "`name` of [project] must be a name such as `my-norms`, got"),
        (None, "norms-", "`name` of [project] must be a name such as `my-norms`, got"),
        (None, "", "`name` of [project] must be a name such as `my-norms`, got"),
        (None, 3, "`name` of [project] must be a name such as `my-norms`, got `3`"),
    ],
)
def test_a_name_that_is_not_valid_for_both_is_refused(
    package: str | None, project: object, said: str
) -> None:
    assert said in refuse(package, project)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("json", "a word or module of Python"),
        ("lambda", "a word or module of Python"),
        ("double", "a word of C++"),
        ("std", "a word of C++"),
        ("linux", "a word of C++"),
        ("aten", "a namespace of torch or CUDA"),
        ("cub", "a namespace of torch or CUDA"),
        ("torch", "a package that torch or the toolkit needs"),
        ("numpy", "a package that torch or the toolkit needs"),
        ("triton", "a package that torch or the toolkit needs"),
        ("fatwheel", "a package that torch or the toolkit needs"),
        ("csrc", "a folder of many projects"),
        ("build", "a package that torch or the toolkit needs"),
        ("tests", "a folder of many projects"),
    ],
)
def test_a_name_that_something_else_has_is_refused(name: str, owner: str) -> None:
    assert f"is `{name}`, which is {owner}" in refuse(name, name)
    assert f"is `{name}`, which is {owner}" in refuse(None, name)


def test_no_name_is_taken_of_many_that_are_free() -> None:
    for name in ("my_norms", "own_kernels", "flash_norms", "torch_norms", "cuda_rows", "rows"):
        assert find_owner(name) == ""


def test_an_installed_package_whose_name_begins_another_is_named(tmp_path: Path) -> None:
    for name in ("my", "my_norms", "my_norms_more", "mynorms", "other"):
        write(tmp_path / name / "product.json", "{}")
        write(tmp_path / name / "_toolkit" / "product.py")
    write(tmp_path / "my_no" / "product.json", "{}")  # of another package
    folders = [str(tmp_path), str(tmp_path / "none")]
    assert find_neighbours("my_norms", folders) == ["my", "my_norms_more"]
    assert find_neighbours("my_rows", folders) == ["my"]
    assert find_neighbours("norms", folders) == []
    assert find_neighbours("norms") == []


def test_a_module_that_python_finds_is_known() -> None:
    assert is_importable("pytest")
    assert not is_importable("my_norms_that_nobody_has")


def test_a_namespace_that_something_else_has_is_refused() -> None:
    require_namespace({"namespace": "my_norms_kernels"})
    require_namespace({})
    with pytest.raises(DeclarationError) as caught:
        require_namespace({"namespace": "cutlass"})
    assert str(caught.value).startswith(
        "`namespace` of [tool.kernels] is `cutlass`, which is a namespace of torch or CUDA\n"
    )
