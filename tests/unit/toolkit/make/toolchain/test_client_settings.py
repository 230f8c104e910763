from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.toolchain.client_settings import (
    PYPI,
    find_links,
    find_torch,
    index_url,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def pip_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pip.conf"
    path.write_text("")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return path


def test_find_links_of_pip_are_divided_by_blanks_and_those_of_uv_by_commas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "flash_dist.toolkit.make.toolchain.client_settings.read_setting", lambda _: "/from/a/file"
    )
    environ = {"PIP_FIND_LINKS": "/one /two", "UV_FIND_LINKS": "/three,/four"}
    assert find_links(environ) == ["/one", "/two", "/three", "/four", "/from/a/file"]


def test_nothing_named_is_no_folder_and_not_the_present_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "flash_dist.toolkit.make.toolchain.client_settings.read_setting", lambda _: ""
    )
    assert find_links({}) == []


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({"PIP_INDEX_URL": "https://a/simple/", "UV_INDEX_URL": "https://b"}, "https://a/simple"),
        ({"UV_DEFAULT_INDEX": "https://b/simple"}, "https://b/simple"),
        ({"UV_INDEX_URL": "https://c/simple"}, "https://c/simple"),
        ({"PIP_INDEX_URL": ""}, PYPI),
    ],
    ids=["pip", "uv", "older uv", "empty"],
)
def test_the_index_is_the_one_that_pip_or_uv_was_told(
    environ: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flash_dist.toolkit.make.toolchain.client_settings.read_setting", lambda _: ""
    )
    assert index_url(environ) == url


def test_the_index_of_pips_own_settings_is_read_inside_an_isolated_build(
    pip_settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip", reason="this environment was made without pip")
    pip_settings.write_text("[global]\nindex-url = https://mirror.example/simple\n")
    site = tmp_path / "site"  # pip puts this folder first, which hides other packages
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys; sys.path = [one for one in sys.path if 'site-packages' not in one]"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert index_url({}) == "https://mirror.example/simple"


def test_torch_is_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_torch()
    torch = pytest.importorskip("torch", reason="this environment has no torch")
    assert found is not None
    assert found[0] == torch.__version__
    assert (found[1] / "include").is_dir()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    assert find_torch() is None
