"""Run the Python blocks of Markdown pages: `documented_code.py [--package NAME]... PAGE...`.

Each block runs in its own process and must be complete. These rules make it small enough for a
machine without GPUs:

1. "cuda" becomes "cpu" and "nccl" becomes "gloo", also in `x.cuda()` and in "cuda:0". A statement
   that calls a function of torch.cuda, such as `torch.cuda.set_device(rank)`, is left out.
2. Whole numbers from 1000 to 65536 become 64.
3. The environment is that of torchrun with one rank.
4. torch.compile takes the backend "aot_eager", which needs no compiler.
5. `X.from_pretrained(...)` is a tiny X with random weights.

A block that imports one of PACKAGES runs only if `--package` names it. Otherwise it must compile,
and the names that it takes from flash_dist must exist.

Prints `PAGE:LINE: error` for each block that fails, and exits 1 if there is one. With `--package`
only the blocks that import one of the named packages run.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import socket
import sys
import textwrap
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

PACKAGES = ("diffusers", "kernels", "torchtitan", "transformers")

_FENCED = re.compile(r"^( *)```python\b[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_RENAMED = {"nccl": "gloo"}
_LARGE = range(1000, 65537)
_SMALL = 64
_SECONDS = 600  # limit for one block, as the machine may be busy


@dataclass(frozen=True)
class Block:
    """The code of one block, and the line of its page where the code begins."""

    page: str
    line: int
    code: str

    def parse(self) -> ast.Module:
        """Return the block's syntax tree, with line numbers of the page."""
        return ast.parse("\n" * (self.line - 1) + self.code, self.page)


def find_blocks(page: Path) -> Iterator[Block]:
    """Yield the Python blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCED.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(str(page), line, textwrap.dedent(found[2]))


def find_packages(tree: ast.Module) -> set[str]:
    """Return the PACKAGES that a block imports."""
    return set().union(*map(_list_imported, ast.walk(tree))) & set(PACKAGES)


def _list_imported(node: ast.AST) -> set[str]:
    """Return the top-level packages that a statement imports."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return {name.partition(".")[0] for name in names}


class _Cut(ast.NodeTransformer):
    """Applies rules 1, 2 and 5 to a syntax tree."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        value = node.value
        if isinstance(value, str):
            value = _RENAMED.get(value, re.sub(r"^cuda(:\d+)?$", "cpu", value))
        elif isinstance(value, int) and value in _LARGE:
            value = _SMALL
        return ast.copy_location(ast.Constant(value), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if node.attr == "cuda" and not _is_torch(node.value):
            node.attr = "cpu"
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Attribute):
            owner = called.value
            if owner.attr == "cuda" and _is_torch(owner.value):
                return ast.copy_location(ast.Pass(), node)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
            maker = ast.copy_location(ast.Name("make_tiny", ast.Load()), node)
            made = ast.Call(maker, [node.func.value], node.keywords)
            return ast.copy_location(made, node)
        return node


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def make_tiny(model: Any, **options: Any) -> Any:  # noqa: ANN401
    """Return a tiny model with random weights for `model.from_pretrained(..., **options)`."""
    if model.__module__.partition(".")[0] == "diffusers":  # a pipeline
        import diffusers  # noqa: PLC0415

        return SimpleNamespace(
            transformer=diffusers.FluxTransformer2DModel(
                in_channels=4,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                axes_dims_rope=(4, 4, 8),
            )
        )
    import transformers  # noqa: PLC0415

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return model.from_config(config, **options)


def _run(block: Block, tree: ast.Module) -> None:
    module = ModuleType("__main__")
    module.__dict__["make_tiny"] = make_tiny
    sys.modules["__main__"] = module
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    code = compile(ast.fix_missing_locations(_Cut().visit(tree)), block.page, "exec")
    exec(code, module.__dict__)  # noqa: S102


def _check_names(block: Block, tree: ast.Module) -> None:
    """Run the imports from flash_dist, and look up the attributes that a block uses of them."""
    compile(tree, block.page, "exec")
    ours: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and "flash_dist" in _list_imported(node):
            exec(compile(ast.Module([node], []), block.page, "exec"), ours)  # noqa: S102
    for node in ast.walk(tree):
        taken_of = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(taken_of, ast.Name) and isinstance(ours.get(taken_of.id), ModuleType):
            lines = "\n" * (taken_of.lineno - 1)
            eval(compile(f"{lines}{ast.unparse(node)}", block.page, "eval"), ours)  # noqa: S307


def _name_error(block: Block, error: BaseException) -> str:
    """Return `PAGE:LINE: error`, with the line of the block that raised it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == block.page
    ]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else block.line
    message = str(error).partition("\n")[0]
    return f"{block.page}:{line}: {type(error).__name__}: {message}"


def _attempt(block: Block, packages: set[str], sender: Connection) -> None:
    """Send the problem of a block: empty if there is none, None if another run covers the block."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, sys.stdout.fileno())
    try:
        tree = block.parse()
        needed = find_packages(tree)
        if packages and not needed & packages:
            sender.send(None)
            return
        (_run if needed <= packages else _check_names)(block, tree)
    except BaseException as error:  # noqa: BLE001
        sender.send(_name_error(block, error))
    else:
        sender.send("")


def run_apart(block: Block, packages: set[str]) -> str | None:
    """Run a block in its own process, and return the message of `_attempt`."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_attempt, args=(block, packages, sender))
    process.start()
    sender.close()
    try:
        late = f"{block.page}:{block.line}: it ran for more than {_SECONDS} s"
        return receiver.recv() if receiver.poll(_SECONDS) else late
    except EOFError:
        return f"{block.page}:{block.line}: its process ended"
    finally:
        process.kill()
        process.join()


def _find_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def main() -> int:
    """Run all blocks, print the problems and the number of blocks run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", action="append", default=[], choices=PACKAGES)
    parser.add_argument("pages", nargs="+", type=Path)
    arguments = parser.parse_args()
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= one_rank | {"MASTER_PORT": str(_find_port()), "CUDA_VISIBLE_DEVICES": ""}
    blocks = [block for page in arguments.pages for block in find_blocks(page)]
    found = [run_apart(block, set(arguments.package)) for block in blocks]
    ran = [problem for problem in found if problem is not None]
    sys.stdout.writelines(f"{problem}\n" for problem in ran if problem)
    sys.stderr.write(f"{len(ran)} blocks ran\n")
    return int(any(ran))


if __name__ == "__main__":
    sys.exit(main())
