"""Entries that explain messages about packages that are absent, or are not what a program needs.

Sources: transformers, flash-attention, Hugging Face kernels, bitsandbytes.
"""

from __future__ import annotations

from typing import Final

from ...product import NAME
from ..entry import Entry

FLASH_ATTN_ABSENT: Final = Entry(
    "A program needs flash-attention, which is not installed",
    '`attn_implementation="flash_attention_2"` of transformers, and the code of some models, need '
    "the package flash_attn. It was never installed (its build often fails), is in another "
    "environment, or cannot be imported.",
    "`python -c 'import flash_attn'` shows which it is. Without it, ask for "
    '`attn_implementation="sdpa"`; a program that imports it by name can take '
    f"`{NAME}.compat.flash_attn`.",
    messages=(
        "FlashAttention2 has been toggled on, but it cannot be used",
        "FlashAttention-2 has been toggled on, but it cannot be used",
        "required packages that were not found in your environment: flash_attn",
        "requires the following packages that were not found in your environment: flash_attn",
        "No module named 'flash_attn'",
    ),
)

BITSANDBYTES_SETUP: Final = Entry(
    "bitsandbytes has no library for this CUDA, or it does not load",
    "It ships a library for each version of CUDA and loads the one for torch's CUDA. There is "
    "none for this version, or the loader refused it; the lines before the message say which.",
    "`pip install --upgrade bitsandbytes`, then `python -m bitsandbytes` shows what it looks for. "
    "Unset BNB_CUDA_VERSION if it was set for another torch.",
    messages=(
        "CUDA Setup failed despite GPU being available",
        "CUDA Setup failed despite CUDA being available",
        "The installed version of bitsandbytes was compiled without GPU support",
    ),
)

FLASH_ATTN_INCOMPLETE: Final = Entry(
    "The installed flash_attn is not the complete package",
    "Python found the package, but not the requested name. `(unknown location)`: the folder has "
    "no `__init__.py`, for example after an uninstall or in a clone. `flash_attn_func` with a "
    "file behind it: a version before 2. Or another package has this name.",
    "`python -c 'import flash_attn; print(flash_attn.__path__)'` shows which folder it is: leave "
    "or delete it, then `pip install --no-build-isolation flash-attn`.",
    messages=(
        "cannot import name '{name}' from 'flash_attn'",
        "No module named 'flash_attn.{module}'",
    ),
    said="the flash_attn that Python finds is not the complete package",
)

FLASH_ATTN_CUDA_ABSENT: Final = Entry(
    "flash-attention is installed without its kernels",
    "The Python files of flash_attn were found, but the compiled module was not: it was built "
    "with FLASH_ATTENTION_SKIP_CUDA_BUILD, for another Python, or its sources come before the "
    "installed package.",
    "Leave the folder with its sources. Otherwise `pip uninstall flash-attn`, and install a wheel "
    "of its release page for this Python, torch and CUDA.",
    messages=("No module named 'flash_attn_2_cuda'", "No module named 'flash_attn_cuda'"),
)

FLASH_ATTN_3_ABSENT: Final = Entry(
    "FlashAttention 3 is a separate package and is not installed",
    "It is not part of flash-attn 2: it is built from the folder `hopper` of the same repository, "
    "is made for Hopper (9.0), and its modules are `flash_attn_3` and `flash_attn_interface`.",
    "https://download.pytorch.org/whl/flash-attn-3/ has its wheels for CUDA 12.6 and newer. On "
    'other GPUs than Hopper use flash-attn 2 or `attn_implementation="sdpa"`.',
    messages=(
        "No module named 'flash_attn_3'",
        "No module named 'flash_attn_3._C'",
        "No module named 'flash_attn_interface'",
    ),
)

HUB_NO_VARIANT: Final = Entry(
    "The Hub has no build of this kernel for this torch and CUDA",
    "A kernel of Hugging Face is built for some pairs of torch and CUDA, named like "
    "`torch29-cxx11-cu128-x86_64-linux`, but not for the installed pair. A nightly or very new "
    "torch is the most common cause; a torch without CUDA is another.",
    "The folder `build` of the kernel's page lists its variants: install a torch of one of them. "
    'Until then `attn_implementation="sdpa"` needs no kernel of the Hub.',
    messages=(
        "Cannot find a build variant for this system",
        "Could not find a kernel variant for your system",
        "Kernel does not have a variant",
    ),
)
