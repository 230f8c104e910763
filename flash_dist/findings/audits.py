"""Ids of `audit`: where a release falls short."""

from __future__ import annotations

from typing import Final

from .entry import Entry

AUDIT_UNREAD: Final = Entry(
    "audit-unread",
    "A file of the release cannot be read",
    "An audit passes nothing that it could not look at: a damaged archive, a library that is "
    "cut short, or one that is packed in an unknown way.",
    "Build or download the file again. `python -m flash_dist inspect FILE` shows what can be "
    "read of it.",
)

AUDIT_NO_GPU_CODE: Final = Entry(
    "audit-no-gpu-code",
    "The release has no GPU code",
    "No library in it holds a fatbin for NVIDIA GPUs. The build left CUDA out, most often "
    "because it found no nvcc.",
    "Look for `nvcc` in the log of the build. If the wheel is meant for CPUs, do not audit it.",
)

AUDIT_NOT_UNDERSTOOD: Final = Entry(
    "audit-not-understood",
    "GPU code that is not understood",
    "An image or its header is of a kind, version or compression that this tool does not know. "
    "The audit fails closed: nobody can tell what the image is for.",
    "Update flash_dist. If the newest one does not know it either, report it with the output "
    "of `python -m flash_dist inspect --json FILE`.",
)

AUDIT_TARGET_MISSING: Final = Entry(
    "audit-target-missing",
    "A library lacks a required target",
    "`require` names targets that every fatbin of every library must have: a fatbin is what one "
    "source file became. Code for a family (sm_100f) or a chip (sm_90a) stands for the GPUs it "
    "is named after, SASS for 9.0 does not stand for 9.0a, nor PTX for SASS. Fatbins of one "
    "target, whose kernels are named after it, count as one for each kernel.",
    "If it is in some fatbins only, look at how their source files are compiled, or let them be "
    "with `--allow-missing REGEX`, a pattern of their kernels: a library that chooses its kernels "
    "itself (cuBLAS) has some for one GPU alone. Else add the target where that "
    "library is compiled (TORCH_CUDA_ARCH_LIST, CMAKE_CUDA_ARCHITECTURES), or take it out of "
    "`require`.",
)

AUDIT_TARGET_EXTRA: Final = Entry(
    "audit-target-extra",
    "A library has a target that is not required",
    "`forbid-extra` allows no other targets than those of `require`: each costs size and time "
    "to build. Libraries of CUDA that are linked statically bring their own targets.",
    "Leave the target out of the build, or add it to `require`.",
)

AUDIT_MIN_DRIVER: Final = Entry(
    "audit-min-driver",
    "The oldest driver that is promised does not load all of it",
    "`min-driver` is the oldest driver that users may have. Some images need a newer one: for "
    "their CUDA major version, their PTX ISA, or compression with zstd.",
    "Build with an older CUDA, leave the PTX out, compress with "
    "`nvcc --compress-mode=speed`, or promise a newer driver.",
)

AUDIT_KERNEL_NOT_REAL: Final = Entry(
    "audit-kernel-not-real",
    "A required kernel is a stub or missing for a target",
    "The kernel has a name in the library, and for a required target its body does nothing, "
    "prints a message or traps, or the image is without it. A call there fails or does "
    "nothing.",
    "`python -m flash_dist inspect --level coverage FILE` shows where it is real. Compile it "
    "for that target; a target with a suffix (9.0a) may be what its body asks for.",
)

AUDIT_KERNEL_ABSENT: Final = Entry(
    "audit-kernel-absent",
    "No kernel has a required name",
    "`require-kernels` lists parts of names, and no kernel of the release has this one.",
    "`python -m flash_dist inspect --level kernels FILE` lists the names. Correct the list, or "
    "compile the file that holds the kernel.",
)

AUDIT_TOO_LARGE: Final = Entry(
    "audit-too-large",
    "The file is larger than allowed",
    "`max-size` bounds the file, as an index or a budget does (PyPI takes 100 MB unless asked "
    "for more).",
    "`python -m flash_dist inspect --level sizes FILE` shows which targets take the space. "
    "Leave out targets or compress: `nvcc --compress-mode=size`.",
)

AUDIT_LOST: Final = Entry(
    "audit-lost",
    "Something that the older release had is gone",
    "A target or kernel of `baseline` is not in this release, so that users of that GPU or "
    "function would lose it by an upgrade.",
    "`python -m flash_dist inspect --diff OLD NEW` lists all changes. Put it back, or audit "
    "against the release from which on it is meant to be gone.",
)

AUDIT_WHEEL_NAME: Final = Entry(
    "audit-wheel-name",
    "The wheel's name, metadata and manifest disagree",
    "File name, METADATA and `_build.json` of a wheel of this package must tell one version, "
    "one arch set and the expected tag.",
    "Do not rename wheels; download it again, or build it again: in a clone by "
    "`nox -s build_wheels`.",
)

AUDIT_MANIFEST: Final = Entry(
    "audit-manifest",
    "The build manifest contradicts itself",
    "`_build.json` declares kernels twice, for targets that its arch set does not list, or "
    "none for one that it lists.",
    "Download it again, or build it again, in a clone by `nox -s build_wheels`; a manifest is "
    "not to be edited.",
)

AUDIT_EMBEDDED_DIFFERS: Final = Entry(
    "audit-embedded-differs",
    "The kernels in the wheel are not those that are declared",
    "A kernel is declared and not embedded, embedded and not declared, or embedded twice.",
    "Build again in a clean build folder. If it stays, `csrc/kernels.toml` and what CMake "
    "compiles differ.",
)

AUDIT_RESOURCES_DIFFER: Final = Entry(
    "audit-resources-differ",
    "A kernel's resources are not those that are declared",
    "Registers, stack or threads in the library differ from the manifest, or PTX was not "
    "assembled offline: the library and the manifest come from different compilations.",
    "Build again in a clean build folder.",
)

AUDIT_IMAGE_UNEXPECTED: Final = Entry(
    "audit-image-unexpected",
    "An image is not of the kind that the build makes",
    "Every image of this package is for a target of the arch set, linked, compressed with "
    "zstd, and PTX modules hold one kernel each.",
    "Look at the nvcc options in the log of the build; something was added to it.",
)

AUDIT_LINKAGE: Final = Entry(
    "audit-linkage",
    "A library needs, searches or exports what it should not",
    "The two libraries of this package need the system's libraries and torch's, search beside "
    "themselves only, and export names with `flash_dist_` only, so that they load anywhere and "
    "clash with nothing.",
    "`readelf -d FILE` and `nm -D FILE` show it. Link the new dependency statically, or hide "
    "the symbols.",
)
