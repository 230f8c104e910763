"""Print where torch and the CUDA packages of this Python are installed, as CMake code."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import torch
except ModuleNotFoundError:
    sys.exit(
        f"error: no torch in {sys.executable}\n\n"
        "hint: activate the environment that holds it, or pass -DPython3_EXECUTABLE=<its python>"
    )

LIBRARIES = ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")


def main() -> None:
    """Print the CMake code."""
    root = Path(torch.__file__).parent
    libraries = [root / "lib" / f"lib{name}.so" for name in LIBRARIES]
    found = {
        "TORCH_ROOT": root,
        "TORCH_VERSION": torch.__version__,
        "TORCH_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
        "TORCH_LIBRARIES": ";".join(str(library) for library in libraries if library.is_file()),
        "NVIDIA_ROOT": root.parent / "nvidia" / "cu13",
    }
    for name, value in found.items():
        print(f'set({name} "{value}")')


if __name__ == "__main__":
    main()
