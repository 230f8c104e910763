"""Ids of findings of `audit`: shortfalls of a release."""

from __future__ import annotations

from typing import Final

from ..product import NAME, PROGRAM
from .entry import Entry

AUDIT_UNREAD: Final = Entry(
    "A file of the release cannot be read",
    "An audit does not pass a file that it cannot read: a damaged archive, a truncated library, "
    "or one packed in an unknown way.",
    f"Build or download the file again. `{PROGRAM} inspect FILE` shows what can be read of it.",
)

AUDIT_NO_GPU_CODE: Final = Entry(
    "The release has no GPU code",
    "No library in it holds a fatbin for NVIDIA GPUs. The build skipped CUDA, most often because "
    "it found no nvcc.",
    "Look for `nvcc` in the log of the build. If the wheel is meant for CPUs, do not audit it.",
)

AUDIT_NOT_UNDERSTOOD: Final = Entry(
    "Some GPU code is not understood",
    "An image or its header is of a kind, version or compression that this tool does not know. "
    "The audit fails, because the target of the image is unknown.",
    f"Update {NAME}. If the newest one does not know it either, report it with the output "
    f"of `{PROGRAM} inspect --json FILE`.",
)

AUDIT_TARGET_MISSING: Final = Entry(
    "A library lacks a required target",
    "`require` names targets that every fatbin of every library must have; one source file "
    "becomes one fatbin. Code for a family (sm_100f) or a chip (sm_90a) counts for the GPUs in "
    "its name. SASS for 9.0 does not count as 9.0a, nor PTX as SASS. Fatbins with one target "
    "each, whose kernels have it in their names, count as one fatbin per kernel.",
    "If only some fatbins lack it, check how their source files are compiled, or allow them with "
    "`--allow-missing REGEX`, a pattern of their kernels: a library that chooses its kernels "
    "itself (cuBLAS) has some for only one GPU. Otherwise add the target where the library is "
    "compiled (TORCH_CUDA_ARCH_LIST, CMAKE_CUDA_ARCHITECTURES), or remove it from `require`.",
)

AUDIT_TARGET_EXTRA: Final = Entry(
    "A library has a target that is not required",
    "`forbid-extra` allows only the targets of `require`: others cost size and build time. CUDA "
    "libraries that are linked statically add their own targets.",
    "Leave the target out of the build, or add it to `require`.",
)

AUDIT_MIN_DRIVER: Final = Entry(
    "The oldest allowed driver cannot load all of the code",
    "`min-driver` is the oldest driver that users may have. Some images need a newer one: for "
    "their CUDA major version, their PTX ISA, or compression with zstd.",
    "Build with an older CUDA, leave the PTX out, compress with `nvcc --compress-mode=speed`, or "
    "require a newer driver.",
)

AUDIT_KERNEL_NOT_REAL: Final = Entry(
    "A required kernel is a stub or missing for a target",
    "The library has the kernel, but for a required target its body does nothing, prints a "
    "message or traps, or the image lacks it. A call on that GPU fails or does nothing.",
    f"`{PROGRAM} inspect --level coverage FILE` shows the targets with a real body. "
    "Compile it for that target; its body may need a target with a suffix (9.0a).",
)

AUDIT_KERNEL_ABSENT: Final = Entry(
    "No kernel has a required name",
    "`require-kernels` lists parts of names, but no kernel of the release has this one.",
    f"`{PROGRAM} inspect --level kernels FILE` lists the names. Correct the list, or "
    "compile the file that holds the kernel.",
)

AUDIT_TOO_LARGE: Final = Entry(
    "The file is larger than allowed",
    "`max-size` limits the size of the file. PyPI, for example, accepts 100 MB unless asked for "
    "more.",
    f"`{PROGRAM} inspect --level sizes FILE` shows which targets take the space. "
    "Leave out targets or compress: `nvcc --compress-mode=size`.",
)

AUDIT_LOST: Final = Entry(
    "Code of the older release is missing",
    "A target or kernel of `baseline` is not in this release. Users of that GPU or function would "
    "lose it with an upgrade.",
    f"`{PROGRAM} inspect --diff OLD NEW` lists all changes. Restore it, or use a "
    "baseline that does not have it.",
)

AUDIT_WHEEL_NAME: Final = Entry(
    "The wheel's name, metadata and manifest disagree",
    "File name, METADATA and `_build.json` of a wheel of this package must give one version, one "
    "arch set and the expected tag.",
    "Do not rename wheels; download it again, or build it again: in a clone by "
    "`nox -s build_wheels`.",
)

AUDIT_MANIFEST: Final = Entry(
    "The build manifest contradicts itself",
    "`_build.json` declares kernels twice, for targets that its arch set does not list, or "
    "none for one that it lists.",
    "Download it again, or build it again, in a clone by `nox -s build_wheels`. Do not edit a "
    "manifest.",
)

AUDIT_EMBEDDED_DIFFERS: Final = Entry(
    "The kernels in the wheel differ from the declared ones",
    "A kernel is declared but not embedded, embedded but not declared, or embedded twice.",
    "Build again in a clean build folder. If the finding stays, CMake compiles other kernels than "
    "`csrc/kernels.toml` lists.",
)

AUDIT_RESOURCES_DIFFER: Final = Entry(
    "A kernel's resources differ from the declared ones",
    "Registers, stack or threads in the library differ from the manifest, or PTX was not "
    "assembled offline: the library and the manifest come from different compilations.",
    "Build again in a clean build folder.",
)

AUDIT_IMAGE_UNEXPECTED: Final = Entry(
    "An image is of a kind that the build does not make",
    "Every image of this package is for a target of the arch set, linked, compressed with "
    "zstd, and PTX modules hold one kernel each.",
    "Check the nvcc options in the build log for additions.",
)

AUDIT_LINKAGE: Final = Entry(
    "A library has unexpected dependencies, search paths or exports",
    "The libraries of this package need only libraries of the system and of torch, search "
    f"only their own folder, and export only names with `{NAME}_`. So they load anywhere and "
    "do not clash with other libraries.",
    "`readelf -d FILE` and `nm -D FILE` show it. Link the new dependency statically, or hide "
    "the symbols.",
)
