"""Every Python block of the Markdown pages runs, by the rules of tests/documented_code.py.

Blocks that import transformers, diffusers, kernels or torchtitan are compiled here, and their
imports from flash_dist are looked up. The first three run in tests/integrations.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "documented_code.py"
FIXED = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md")
PAGES = [*FIXED, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]

IMPORTING_KERNELS = """import kernels
from flash_dist.integrations import torch_sdpa as provider
provider.no_such_name()"""
ON_A_GPU = """import torch
x = torch.zeros(2, 4096, device="cuda:0").cuda()
assert (x.shape, x.device.type) == ((2, 64), "cpu")
torch.cuda.synchronize()
torch.distributed.init_process_group("nccl")
assert torch.distributed.get_backend() == "gloo"
"""

# Each block of the page, and its expected problem: the text after `LINE: `, or None.
PLANTED = [
    ("kept = 1", None),
    ("print(kept)", "NameError: name 'kept' is not defined"),
    ("\n\nif True print()", "SyntaxError: "),
    ("from flash_dist import no_such_name", "ImportError: cannot import name 'no_such_name'"),
    ("import transformers\ntransformers.no_such_name", None),
    (IMPORTING_KERNELS, "AttributeError: module 'flash_dist.integrations.torch_sdpa' has no"),
    (ON_A_GPU, None),
    ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ("import os\nos._exit(0)", "its process ended"),
]


def run(*pages: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *pages]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def count_fences(page: str) -> int:
    return len(re.findall(r"^ *```py", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_python_block_of_the_pages_runs() -> None:
    done = run(*PAGES, folder=ROOT)
    assert done.returncode == 0, f"blocks that fail:\n{done.stdout}{done.stderr}"
    assert done.stderr.endswith(f"{sum(map(count_fences, PAGES))} blocks ran\n")


def test_what_is_wrong_in_a_block_is_named_with_its_line(tmp_path: Path) -> None:
    page = "".join(f"```python\n{code}\n```\n\n" for code, _ in PLANTED)
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    done = run("page.md", folder=tmp_path)
    found = dict(line.partition(": ")[::2] for line in done.stdout.splitlines())
    wanted, line = {}, 2
    for code, problem in PLANTED:
        raising = line + (code.count("\n") if problem and "process" not in problem else 0)
        if problem is not None:
            wanted[f"page.md:{raising}"] = problem
        line += code.count("\n") + 4
    assert done.returncode == 1
    assert found.keys() == wanted.keys(), done
    assert all(found[place].startswith(problem) for place, problem in wanted.items()), found
