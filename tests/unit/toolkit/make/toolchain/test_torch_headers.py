from __future__ import annotations

import hashlib
import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.make.toolchain import torch_headers
from flash_dist.toolkit.make.toolchain.client_settings import OFFLINE
from flash_dist.toolkit.make.toolchain.torch_headers import (
    Lock,
    TorchHeadersError,
    closure,
    find_headers,
    find_local_wheel,
    list_needed,
)

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "torch/csrc/stable/library.h": "#include <torch/csrc/stable/tensor.h>\n#include <vector>\n",
    "torch/csrc/stable/tensor.h": '#pragma once\n  #  include "../other.h"\n',
    "torch/csrc/other.h": "#if 0\n#include <torch/csrc/hidden.h>\n#endif\n",
    "torch/csrc/hidden.h": "",
    "torch/csrc/unused.h": "",
}
LOCK = Lock(
    "2.13.0", {name: hashlib.sha256(text.encode()).hexdigest() for name, text in FILES.items()}
)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "links" / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"torch/include/{name}", text)
    return path


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("TORCH_ROOT", "PIP_FIND_LINKS", "UV_FIND_LINKS", "PIP_INDEX_URL", *OFFLINE)
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "flash_dist.toolkit.make.toolchain.client_settings.read_setting", lambda _: ""
    )


def test_includes_are_followed_whatever_the_condition_around_them() -> None:
    assert closure(["torch/csrc/stable/library.h", "cuda_runtime.h"], FILES.get) == [
        "torch/csrc/hidden.h",
        "torch/csrc/other.h",
        "torch/csrc/stable/library.h",
        "torch/csrc/stable/tensor.h",
    ]


def test_a_wheel_among_pips_find_links_serves(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    headers = find_headers(tmp_path / "cache", LOCK)
    assert (headers.version, headers.origin) == ("2.13.0", f"from {wheel.name}")
    for name, text in FILES.items():
        assert (headers.include / name).read_text() == text


def test_the_cache_is_used_the_second_time(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    find_headers(tmp_path / "cache", LOCK)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert find_headers(tmp_path / "cache", LOCK).origin == "cached"


def test_a_changed_file_in_the_cache_is_not_used(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    include = find_headers(tmp_path / "cache", LOCK).include
    (include / "torch/csrc/unused.h").write_text("changed")
    assert find_headers(tmp_path / "cache", LOCK).origin != "cached"


def test_a_header_that_is_not_the_pinned_one_is_refused(wheel: Path, tmp_path: Path) -> None:
    lock = Lock("2.13.0", {**LOCK.sha256, "torch/csrc/unused.h": "0" * 64})
    with (
        zipfile.ZipFile(wheel) as archive,
        pytest.raises(TorchHeadersError, match=r"unused\.h of torch 2\.13\.0 is not the pinned"),
    ):
        torch_headers.extract(archive, lock, tmp_path / "out")


def test_another_version_among_the_find_links_is_not_taken(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", str(wheel.parent))
    assert find_local_wheel("2.13.0") == wheel
    assert find_local_wheel("2.13") is None
    assert find_local_wheel("2.14.0") is None


def test_torch_root_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include/torch/csrc/stable").mkdir(parents=True)
    (tmp_path / "version.py").write_text("__version__ = '2.15.0+cu132'\n")
    monkeypatch.setenv("TORCH_ROOT", str(tmp_path))
    headers = find_headers(tmp_path / "cache", LOCK)
    assert headers.include == tmp_path / "include"
    assert headers.version == "2.15.0+cu132"


def test_a_wrong_torch_root_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ROOT", str(tmp_path))
    with pytest.raises(TorchHeadersError, match="TORCH_ROOT"):
        find_headers(tmp_path / "cache", LOCK)


def test_without_network_and_torch_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "nothing").as_uri())
    for name in ("find_own_torch", "find_torch"):
        monkeypatch.setattr(torch_headers, name, lambda: None)
    with pytest.raises(TorchHeadersError, match=r"from file:///\S+/nothing[\s\S]*set TORCH_ROOT"):
        find_headers(tmp_path / "cache", LOCK)


@pytest.mark.parametrize("name", OFFLINE)
def test_an_index_that_is_forbidden_is_not_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_INDEX_URL", "ftp://nobody.asks")
    for find in ("find_own_torch", "find_torch"):
        monkeypatch.setattr(torch_headers, find, lambda: None)
    with pytest.raises(TorchHeadersError, match=f"{name} forbids it"):
        find_headers(tmp_path / "cache", LOCK)


def test_torch_is_asked_for_where_nothing_else_has_the_headers(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    found: list[tuple[str, Path]] = []
    for find in ("find_own_torch", "find_torch"):
        monkeypatch.setattr(torch_headers, find, lambda: next(iter(found), None))
    assert list_needed(tmp_path, LOCK) == [f"torch>={load_project().torch_min}"]
    found.append(("2.12.0", tmp_path))
    assert list_needed(tmp_path, LOCK) == []
    found.clear()
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert list_needed(tmp_path, LOCK) == []
    find_headers(tmp_path, LOCK)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert list_needed(tmp_path, LOCK) == []  # the headers are kept


def test_the_torch_of_an_isolated_build_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "true")
    folder = tmp_path / "torch"
    (folder / "include/torch/csrc/stable").mkdir(parents=True)
    monkeypatch.setattr(torch_headers, "find_own_torch", lambda: ("2.12.1", folder))
    headers = find_headers(tmp_path / "cache", LOCK)
    assert (headers.version, headers.include) == ("2.12.1", folder / "include")


def test_the_lock_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "lock.toml"
    path.write_text(str(LOCK))
    assert Lock.load(path) == LOCK


def test_the_real_lock_pins_what_the_binding_includes() -> None:
    lock = Lock.load()
    included = torch_headers.own_includes(torch_headers._read_binding())
    assert included
    assert included <= set(lock.sha256)


def test_a_wheel_that_lists_its_folders_is_locked_without_them(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel of torch 2.15 lists its folders."""
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("torch/include/torch/csrc/stable/", b"")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(torch_headers, "LOCK", tmp_path / "lock.toml")
    lock = torch_headers.write_lock("2.13.0")
    assert set(lock.sha256) == set(FILES) - {"torch/csrc/unused.h"}
    assert Lock.load(tmp_path / "lock.toml") == lock
