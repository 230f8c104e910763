"""Ids of findings of `doctor --package` and `doctor --wheel` about libraries of any package."""

from __future__ import annotations

from typing import Final

from ..product import NAME, PROGRAM
from .entry import Entry

LIBRARY_UNREAD: Final = Entry(
    "A file cannot be read",
    "It is damaged, encrypted, packed in a way that this tool does not know, or not what its "
    "name says. Its GPU code was not judged.",
    "Unpack or download it again. If the file is intact, report it: `inspect` should read any "
    "CUDA binary.",
)

LIBRARY_NOT_UNDERSTOOD: Final = Entry(
    "Some GPU code is not understood",
    "A container or an image in it is damaged, or of a kind or version that this tool does not "
    "know, such as CUDA Tile IR. It was not judged. This is a failure if nothing else was found, "
    "because the library then has GPU code for unknown GPUs.",
    f"Update {NAME}. If the newest one does not know it either, report it with the output "
    f"of `{PROGRAM} inspect --json FILE`.",
)

NO_GPU_CODE: Final = Entry(
    "The libraries have no GPU code",
    "None of the libraries holds a fatbin for NVIDIA GPUs. Python packages often have their "
    "kernels in another package (torch's are in `torch/lib`), or compile them at run time "
    "(Triton, NVRTC), which cannot be judged beforehand.",
    "Name the package that has the kernels. If the package has kernels of its own, check whether "
    "pip installed a CPU build.",
)

LIBRARY_PARTLY: Final = Entry(
    "Part of a library has no code for this GPU",
    "A library holds many fatbins, one for each source file. Some have code for this GPU, some do "
    "not. This is normal if those kernels are made for another GPU and never called on this one.",
    f"`{PROGRAM} inspect --level coverage FILE` lists which kernels exist for which "
    "target. If a call fails with `no kernel image is available`, install a build for this "
    "compute capability.",
)

LIBRARY_UNVERIFIED: Final = Entry(
    "The library may run, but NVIDIA does not guarantee it",
    "The only matching code is for a GPU of the same major version but of the other kind "
    "(discrete or Jetson), newer than this tool knows, packed in a way that the driver may not "
    "know, or not understood.",
    "Try it and compare its results with those on the CPU, or install a build that names this "
    "compute capability.",
)

LIBRARY_REFUSED: Final = Entry(
    "The driver does not load the code for this GPU",
    "There is code for this GPU, but the driver is too old for the GPU, for the CUDA that made "
    "the code, for its PTX or for its compression. Or the driver does not support such old GPUs, "
    "or a variable forbids using the code. The message says which.",
    "Install the driver that the message names on the host, or unset the variable. Otherwise "
    "install a build for an older CUDA, such as `cu126` instead of `cu130`.",
)

LIBRARY_NO_MATCHING_CODE: Final = Entry(
    "The library has no code for this GPU",
    "Neither its machine code nor its PTX fits this compute capability: calls into it fail with "
    "`no kernel image is available for execution on the device`. It is only a warning if another "
    "library of the package has code for the GPU.",
    "Install a build for this compute capability, or compile the package with "
    "TORCH_CUDA_ARCH_LIST set to it.",
)
