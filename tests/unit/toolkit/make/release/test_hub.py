"""A wheel as a repository of Hugging Face's `kernels`: unique names, digests, contents."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.package import PACKAGE
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.project import PRODUCT_FILE, ROOT, load_project
from flash_dist.toolkit.make.release import hub
from flash_dist.toolkit.make.release.hub import _OPERATORS, Variant, check, write
from flash_dist.toolkit.make.wheels.artefacts import Artefact, ArtefactError, read_artefact
from flash_dist.toolkit.product import BINDING, KERNELS
from tests.unit.made.wheels import write_wheel

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """import torch
from .package import KERNELS  # libflash_dist_kernels.so
library = torch.library.Library("flash_dist", "FRAGMENT")
torch.library.impl(f"flash_dist::{name}", "CPU", fwd)
torch.ops.flash_dist.fwd(q)
_operators = torch.ops.flash_dist
getattr(torch.ops.flash_dist, name)
TEXT = "flash_dist says"
"""
SETS = {archset.name: archset for archset in published_sets()}


def make(
    folder: Path, name: str = "hopper", strings: tuple[str, ...] = ("flash_dist", KERNELS)
) -> Artefact:
    """Write a wheel whose libraries end with some strings, and read it."""
    path = write_wheel(folder / name, SETS[name])
    with zipfile.ZipFile(path) as wheel:
        members = {x: wheel.read(x) for x in wheel.namelist()}
    table = b"\0" + b"\0".join(x.encode() for x in strings) + b"\0"
    code = members[f"flash_dist/{KERNELS}"]
    members[f"flash_dist/{KERNELS}"] = code + b"\0" + KERNELS.encode() + b"\0"
    members[f"flash_dist/{BINDING}"] = code + table + b"libraries of flash_dist\0"
    members["flash_dist/kernels/operators.py"] = SOURCE.encode()
    members["flash_dist/product.json"] = PRODUCT_FILE.read_bytes()
    with zipfile.ZipFile(path, "w") as wheel:
        for x, data in members.items():
            wheel.writestr(x, data)
    return read_artefact(path)


def test_each_copy_has_names_of_its_own_as_long_as_ours(tmp_path: Path) -> None:
    artefact = make(tmp_path)
    variant = Variant(artefact)
    assert len(variant.id) == len("flash_dist")
    assert re.fullmatch("f_[0-9a-z]{8}", variant.id)
    assert Variant(make(tmp_path, "all")).id != variant.id
    files = {x.split("/", 2)[-1]: data for x, data in variant.files().items()}
    assert KERNELS not in files
    kernels, binding = files[f"lib{variant.id}_kernels.so"], files[BINDING]
    assert kernels.endswith(b"\0lib" + variant.id.encode() + b"_kernels.so\0")
    names = f"\0{variant.id}\0lib{variant.id}_kernels.so\0libraries of flash_dist\0"
    assert binding.endswith(names.encode())
    source = files["kernels/operators.py"].decode()
    assert source == SOURCE.replace("flash_dist", variant.id).replace(
        f"{variant.id} says", "flash_dist says"
    )


@pytest.mark.parametrize("name", ["rope", "norms", "my_norms", "a" * 41])
def test_short_names_leave_enough_names_of_their_length(name: str) -> None:
    digests = [hashlib.sha256(bytes([n])).hexdigest() for n in range(8)]
    copies = {hub._name_copy(name, digest) for digest in digests}
    assert len(copies) == len(digests)
    assert all(len(copy) == len(name) and copy.isidentifier() for copy in copies)


@pytest.mark.parametrize("name", ["x", "fp8"])
def test_a_name_that_is_too_short_is_refused(name: str) -> None:
    with pytest.raises(ArtefactError) as caught:
        hub._name_copy(name, "a" * 64)
    assert caught.value.message == (
        f"a package for the hub must have a name of at least 4 letters, got `{name}`"
    )


def test_a_project_without_a_card_gets_one_of_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact = make(tmp_path)
    without = replace(load_project(), hub_card=None)
    monkeypatch.setattr(hub, "load_project", lambda: without)
    card = Variant(artefact).files()["README.md"].decode()
    assert card.startswith("---\nlibrary_name: kernels\n")  # this wheel names no licence
    assert 'kernel = get_local_kernel(Path("FOLDER OF THIS FILE"))\n```\n' in card
    assert "attn" not in card


def test_a_copy_looks_for_the_library_that_it_has(tmp_path: Path) -> None:
    files = {x.split("/", 2)[-1]: data for x, data in Variant(make(tmp_path)).files().items()}
    product = json.loads(files["product.json"])
    assert product["library"] in files
    assert {**product, "library": KERNELS} == json.loads(PRODUCT_FILE.read_text("utf-8"))


def test_no_source_of_ours_names_operators_otherwise() -> None:
    """Look for the attribute `ops.flash_dist`, and for strings that begin with the namespace."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(_OPERATORS.sub("f_00000000", path.read_text()))):
            if isinstance(node, ast.Attribute):
                is_left = node.attr == "flash_dist" and getattr(node.value, "attr", "") == "ops"
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "Library":
                is_left = getattr(node.args[0], "value", "").startswith("flash_dist")
            else:
                is_left = isinstance(node, ast.Constant) and "flash_dist::" in str(node.value)
            assert not is_left, f"{path}:{getattr(node, 'lineno', 0)}"


def test_the_metadata_tell_every_file_and_what_is_really_embedded(tmp_path: Path) -> None:
    artefact = make(tmp_path, "all")
    files = Variant(artefact).files()
    folder = "build/torch-stable-abi210-cu130-x86_64-linux/"
    metadata = json.loads(files.pop(f"{folder}metadata.json"))
    assert metadata["backend"] == {
        "type": "cuda",
        "archs": ["7.5", "8.0", "8.0+PTX", "9.0a", "10.0", "12.0"],
    }
    assert metadata["id"] == Variant(artefact).id
    del files["README.md"]
    wanted = {
        name.removeprefix(folder): base64.b64encode(hashlib.sha256(data).digest()).decode()
        for name, data in files.items()
    }
    assert metadata["digest"] == {"algorithm": "sha256", "files": wanted}


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("cuda12", "torch-stable-abi210-cu124-x86_64-linux"),
        ("arm", "torch-stable-abi210-cu130-aarch64-linux"),
    ],
)
def test_a_variant_is_named_by_torch_cuda_and_machine(
    tmp_path: Path, name: str, variant: str
) -> None:
    assert Variant(make(tmp_path, name)).name == variant


def test_the_docs_print_the_lines_of_the_card(tmp_path: Path) -> None:
    """`tests/integrations/hub` runs these lines."""
    card = Variant(make(tmp_path)).files()["README.md"].decode()
    page = (ROOT / "docs" / "frameworks.md").read_text()
    printed, *_ = re.findall(r"```python\n(.*?get_local_kernel.*?)```", card, re.DOTALL)
    lines = printed.replace("FOLDER OF THIS FILE", "dist/hub/hopper").splitlines()
    assert {line.partition("  #")[0] for line in lines[:6]} <= set(page.splitlines())
    assert lines[4] == 'kernel = get_local_kernel(Path("dist/hub/hopper"))'


def test_a_library_without_the_names_is_refused(tmp_path: Path) -> None:
    artefact = make(tmp_path, strings=(KERNELS,))
    with pytest.raises(ArtefactError, match="has no string `flash_dist`"):
        Variant(artefact).files()


def test_a_repository_is_held_against_its_wheel(tmp_path: Path) -> None:
    artefact = make(tmp_path)
    assert check(tmp_path, [artefact]) == []
    folder = tmp_path / hub.FOLDER / "hopper"
    write(artefact, folder)
    write(artefact, folder)
    (published,) = check(tmp_path, [artefact])
    assert published.wheel == artefact
    assert published.path.name == "metadata.json"
    (folder / "README.md").write_text("another")
    with pytest.raises(ArtefactError, match="is not the repository of"):
        check(tmp_path, [artefact])
