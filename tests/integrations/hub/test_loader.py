"""Output of `nox -s hub` through Hugging Face's loader, alone and beside the installed package.

FLASH_DIST_TEST_HUB is a repository. With a CUDA torch the loader uses it directly, with or without
a GPU. With a CPU torch the loader accepts only CPU variants, so the test copies the folder and
renames its variant.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.hub.repository import copy_repository

kernels = pytest.importorskip("kernels")

# Loads the package, and the kernel from the Hub, in the given order, and compares both.
PROGRAM = """
import sys
from importlib import import_module
from pathlib import Path
import torch
from kernels import get_local_kernel

folder, order = sys.argv[1:]
q = torch.randn(2, 9, 4, 16).requires_grad_()
if order == "after":
    import flash_dist
    flash_dist.flash_attn_func(q, q, q)
kernel = get_local_kernel(Path(folder))
out = kernel.flash_attn_func(q, q, q, causal=True)
dq, = torch.autograd.grad(out.sum(), q)
mask = kernel.BlockMask.causal()
assert torch.equal(kernel.flash_attn_func(q, q, q, mask=mask), out)
assert "GPU" in kernel.check().sentence
library = import_module(f"{kernel.__name__}.toolkit.loading.library")
assert len(library.variants()) > 100
if order == "alone":
    assert not any(name.partition(".")[0] == "flash_dist" for name in sys.modules)
    assert not hasattr(torch.ops.flash_dist, "fwd")
else:
    import flash_dist
    want = flash_dist.flash_attn_func(q, q, q, causal=True)
    assert torch.equal(out, want)
    assert torch.equal(dq, torch.autograd.grad(want.sum(), q)[0])
    assert torch.ops.flash_dist.attention is not getattr(torch.ops, kernel.__name__).fwd
maps = Path("/proc/self/maps").read_text().splitlines()
loaded = {line.split()[-1] for line in maps if line.endswith("_kernels.so")}
assert len(loaded) == (1 if order == "alone" else 2), loaded
"""

# transformers uses the Hub copy as flash-attention. Neither flash-attention nor our package need be
# installed.
MODEL = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(0, 64, (2, 9))
mask = torch.ones_like(ids)
mask[0, :3] = 0
want = model(ids, attention_mask=mask).logits
model.set_attn_implementation("flash_attention_2")
got = model(ids, attention_mask=mask).logits
torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-5, atol=1e-5)
assert any(name.startswith("f_") for name in sys.modules)
"""

# Requests of several lengths at once, with a paged cache. transformers passes pages for single
# queries only on CUDA, so the program skips transformers' test of the machine.
BATCHES = """
import inspect
import torch
import transformers.generation.continuous_batching.initialization as initialization
import transformers.modeling_flash_attention_utils as flash
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, pad_token_id=0,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()
prompts = [torch.randint(2, 64, (length,)).tolist() for length in (5, 9, 17, 3, 40)]
greedy = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
greedy.eos_token_id = None
want = [
    model.generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :].tolist()
    for prompt in prompts
]

calls = []
load = flash._lazy_imports

def load_counted(*args, **options):
    dense, packed, cached, *others = load(*args, **options)

    def counted(*args, **options):
        calls.append(options["block_table"].shape)
        return cached(*args, **options)

    counted.__signature__ = inspect.signature(cached)
    return dense, packed, counted, *others

flash._lazy_imports = load_counted
initialization.ensure_decode_fast_path_is_available = lambda *args: None
model.set_attn_implementation("flash_attention_2")
answers = model.generate_batch(
    inputs=prompts,
    generation_config=greedy,
    continuous_batching_config=ContinuousBatchingConfig(max_blocks_per_request=8),
    progress_bar=False,
)
got = {int(name.rpartition("_")[2]): answer.generated_tokens for name, answer in answers.items()}
assert [got[i] for i in range(len(prompts))] == want, (got, want)
assert len(calls) == 2 * 11, calls  # layers, and tokens behind the first
"""


# Runs the code lines of the model card in the card's folder, with the tensors that these lines
# name.
PRINTED = """
import re
import sys
from pathlib import Path
import torch

q, k, v = torch.randn(3, 2, 9, 4, 16)
(lines,) = re.findall(r"```python\\n(.*?)```", Path(sys.argv[1]).read_text(), re.DOTALL)
exec(lines)
assert out.shape == q.shape
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = os.environ.get("FLASH_DIST_TEST_HUB")
    if not made:
        pytest.skip("FLASH_DIST_TEST_HUB names no repository")
    return copy_repository(Path(made), tmp_path / "repository")


@pytest.mark.parametrize("order", ["alone", "before", "after"])
def test_a_copy_is_served_alone_and_beside_the_package(folder: Path, order: str) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder), order], check=True)


def test_what_the_card_prints_runs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "FOLDER OF THIS FILE").symlink_to(folder)
    command = [sys.executable, "-c", PRINTED, str(folder / "README.md")]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_the_digests_are_those_of_the_loader() -> None:
    made = os.environ.get("FLASH_DIST_TEST_HUB")
    if not made:
        pytest.skip("FLASH_DIST_TEST_HUB names no repository")
    rust = pytest.importorskip("kernels._rust")
    (variant,) = (Path(made) / "build").iterdir()
    metadata = rust.Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))


@pytest.mark.parametrize("program", [MODEL, BATCHES], ids=["forward", "continuous batching"])
def test_transformers_takes_a_copy_for_flash_attention(folder: Path, program: str) -> None:
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22):
        pytest.skip(f"transformers {transformers.__version__} looks for kernels elsewhere")
    if not transformers.utils.is_kernels_available():
        pytest.skip(f"transformers {transformers.__version__} wants a newer loader")
    environ = os.environ | {
        "LOCAL_KERNELS": f"kernels-community/flash-attn2={folder}",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)


def test_doctor_runs_in_a_copy(folder: Path) -> None:
    (variant,) = (folder / "build").iterdir()
    command = [sys.executable, "-m", variant.name, "doctor", "--no-selftest"]
    done = subprocess.run(command, cwd=variant.parent, capture_output=True, text=True, check=False)
    assert "[ok]    extension" in done.stdout, done
    assert "flash_dist 0.1.0" in done.stdout
