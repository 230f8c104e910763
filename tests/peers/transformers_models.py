"""Run transformers' own equivalence tests with our attention, on tiny llama, gemma3 and gpt_oss.

    python tests/peers/transformers_models.py SDIST [PYTEST ...]

The program needs torch, flash_dist, transformers, pytest and parameterized. SDIST is the source
distribution of the installed version of transformers (`pip download --no-deps --no-binary :all:`).
It has the tests that models share, but not the tests of each model. Our name replaces `sdpa` in
these tests, and two missing modules are empty. Run it as a file, so that Python does not find the
sources of flash_dist beside the installed package.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import pytest

COMMON: Final = "test_modeling_common.py"
MISSING: Final = {  # modules of the checkout that the test files import
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
}
FROM, TO = 'attn_implementation="sdpa"', 'attn_implementation="fdist"'

# A model's own test file has a class with its configuration and inputs.
CASES: Final = """
import unittest

import torch
from transformers.testing_utils import torch_device

from flash_dist.integrations.transformers import register
from tests.integrations.transformers.models import DECODERS, VOCABULARY
from {package}.test_modeling_common import ModelTesterMixin

NAME = register()


class Tester:
    batch_size, seq_length, is_training = 3, 9, True

    def __init__(self, family):
        self.family = family

    def prepare_config_and_inputs_for_common(self):
        shape = self.batch_size, self.seq_length
        ids = torch.randint(3, VOCABULARY, shape, device=torch_device)
        inputs = {{"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
        return self.family.make_config(), inputs


def make_case(name):
    family = DECODERS[name]
    model = family.model_class
    for base in model.__mro__:
        if vars(base).get("_supports_sdpa") is False:  # which has no sinks
            base._supports_sdpa = True
    known = model._compatible_flash_implementations
    if known is not None:
        model._compatible_flash_implementations = [*known, NAME]

    class Case(ModelTesterMixin, unittest.TestCase):
        all_model_classes = (model,)
        all_generative_model_classes = (model,)

        def setUp(self):
            self.model_tester = Tester(family)

        def test_ours_padded_to_the_left(self):
            self.flash_attn_inference_equivalence(NAME, "left")

        def test_ours_padded_to_the_right(self):
            self.flash_attn_inference_equivalence(NAME, "right")

        def test_ours_from_a_configuration(self):
            self.flash_attn_from_config(NAME)

    return Case


TestLlama, TestGemma3, TestGptOss = map(make_case, ("llama", "gemma3", "gpt_oss"))
"""
# Attention weights are not returned: these tests are excluded by name.
WANTED: Final = "(test_ours or test_eager_matches_sdpa_inference) and not output_attentions"


def unpack(sdist: Path, folder: Path) -> str:
    """Unpack the tests of a source distribution, and ours, into a folder; return their package."""
    package = "transformers_tests"
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            parts = Path(member.name).parts
            if len(parts) == 3 and parts[1] == "tests" and member.isfile():
                data = archive.extractfile(member)
                assert data is not None
                _write(folder / package / parts[2], data.read().decode())
    for name, text in MISSING.items():
        _write(folder / package / name, text)
    common = folder / package / COMMON
    text = common.read_text()
    if FROM not in text:
        message = f"`{COMMON}` of `{sdist}` must have `{FROM}` in it, got none"
        raise ValueError(message)
    common.write_text(text.replace(FROM, TO))
    _write(folder / "test_transformers_models.py", CASES.format(package=package))
    return package


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text(text)


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path)
    options, others = parser.parse_known_args()
    root = Path(__file__).resolve().parents[2]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        unpack(options.sdist, Path(folder))
        sys.path += [folder, _only_tests(root, Path(folder))]
        own = str(Path(folder) / "test_transformers_models.py")
        flags = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "-W", "ignore"]
        return int(pytest.main([own, *flags, "-k", WANTED, *others]))


def _only_tests(root: Path, folder: Path) -> str:
    """Return a folder from which only our tests can be imported, not the sources of flash_dist."""
    only = folder / "ours"
    only.mkdir()
    (only / "tests").symlink_to(root / "tests")
    return str(only)


if __name__ == "__main__":
    sys.exit(main())
