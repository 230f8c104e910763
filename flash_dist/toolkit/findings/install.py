"""Ids of findings about the installation: system, torch, files, build."""

from __future__ import annotations

from typing import Final

from ..product import KERNELS, NAME, PROGRAM
from .entry import Entry

LIBC_UNSUPPORTED: Final = Entry(
    "The C library is not glibc",
    "The wheels are compiled against glibc. musl (Alpine Linux) and other C libraries lack "
    "symbols that they need, and torch has no wheels for them either.",
    "Use a glibc distribution such as Debian, Ubuntu or Rocky Linux. In a container, start "
    "from an image like `python:3.12-slim` instead of `python:3.12-alpine`.",
)

TORCH_ABSENT: Final = Entry(
    "torch is not installed",
    "The functions of this package are operators of torch. inspect, audit and doctor's "
    "judgement of GPUs work without it. A package that pip builds may not see the installed torch.",
    f"Install a torch that has CUDA in the same environment as {NAME}. If you expected it to "
    "be installed, compare `python -m pip --version` with the Python that runs this. To build a "
    "package against it: `pip install --no-build-isolation NAME`.",
    messages=("No module named 'torch'",),
)

TORCH_BROKEN: Final = Entry(
    "torch is installed but cannot be read",
    "The metadata or `torch/version.py` is missing or damaged, for example after an interrupted "
    "install, or there is a folder `torch` that pip does not know.",
    "Install the same version again, from the index that it came from: "
    "`pip install --force-reinstall --no-deps torch==VERSION`. If pip warns of an invalid "
    "distribution `~orch`, delete that folder first.",
)

TORCH_SHADOWED: Final = Entry(
    "Another file is imported instead of torch",
    "Python searches the folder that it is started in and those of PYTHONPATH before the "
    "installed packages. A script or folder there has the name of torch, or of a package that "
    "torch imports.",
    f"Leave that folder, take it out of PYTHONPATH, or rename the file. `python -P -m {NAME} "
    "doctor` (Python 3.11) ignores the folder that it is started in.",
)

TORCH_TOO_OLD: Final = Entry(
    "torch is older than this build needs",
    "The extension uses torch's stable ABI, which gains functions with each release. An older "
    "torch lacks functions that this build calls, so the extension would not load.",
    "Install at least the version that the message names. torchvision, torchaudio and xformers "
    "must match torch: upgrade them in the same command.",
)

TORCH_CPU_BUILD: Final = Entry(
    "torch was built without CUDA",
    "This torch uses only the CPU, even on a machine with an NVIDIA GPU. It comes from an index "
    "without CUDA builds, or another package pulled it in; the builds for macOS have no CUDA "
    "either.",
    "With an NVIDIA GPU (`nvidia-smi` lists it) uninstall torch and install a CUDA build with the "
    "command that https://pytorch.org/get-started/locally gives for your system. Without one, "
    'tell the program to use the CPU, as by `device="cpu"`.',
    messages=("Torch not compiled with CUDA enabled",),
)

TORCH_NEWER_THAN_TESTED: Final = Entry(
    "torch is newer than this build was tested with",
    "The stable ABI promises that the extension works with newer releases of torch, but it was "
    "not tested with this one.",
    f"Nothing, if `{PROGRAM} selftest` passes. Otherwise look for a newer {NAME}, "
    "or install the newest torch that the message names.",
)

INSTALL_DAMAGED: Final = Entry(
    "Installed files differ from pip's record",
    "A file is missing, or has another size or hash than in the wheel. The cause is a full disk, "
    "an interrupted install, another package that wrote into the folder, or an edit by hand.",
    "Install the wheel again: `pip install --force-reinstall --no-deps WHEEL`. If the same "
    "files differ again, look for a package that has files of the same name.",
)

INSTALL_UNREADABLE: Final = Entry(
    "This user cannot read the installed files",
    "The files are not damaged. They belong to another user, often root with a strict umask, and "
    "a file that cannot be read cannot be loaded.",
    "As the owner, run `chmod -R a+rX` on the folder that the message names, and `umask 022` "
    "before the next install.",
)

INSTALL_TWICE: Final = Entry(
    "The package is installed in two folders",
    "Python takes the first folder on `sys.path` that has the package. Another program, or the "
    "same one started from another folder, may load the other copy, which may have another "
    "version and support other GPUs.",
    f"Keep one of them: `pip uninstall {NAME}` in the other environment, or delete the copy. A "
    "source tree counts as a copy: do not start Python inside it.",
)

INSTALL_LEFTOVERS: Final = Entry(
    "The package folder has files that this version did not install",
    "Files of an older version, or folders whose name starts with `~` from an interrupted "
    "install, are beside the recorded ones. An old library may be loaded instead of the new one.",
    f"`pip uninstall {NAME}`, delete what is left of the folder, and install again.",
)

NOT_BUILT: Final = Entry(
    f"No built {NAME} was found",
    "Neither the build manifest nor the kernel library can be read. That is normal in a source "
    "tree, which has Python files only.",
    f"Install a wheel (`{PROGRAM} select` says which), and start Python outside of the "
    "source tree. In a clone `nox -s build_wheels -- SET` builds one into `dist/SET/`.",
)

MANIFEST_UNREADABLE: Final = Entry(
    "The build manifest cannot be read",
    "`_build.json`, which is in every wheel, is missing or damaged. The GPUs are judged by the "
    "kernels in the library. The declared ones are unknown.",
    "Install the wheel again. If a packager left the file out, put it back: it belongs to the "
    "package.",
)

LIBRARY_UNREADABLE: Final = Entry(
    "The kernel library cannot be read",
    f"`{KERNELS}` is missing, truncated or damaged. Or it is intact, but this user "
    "cannot read it, or this Python has no module for zstd. The GPUs are judged by the manifest, "
    "without proof.",
    "The message says which. Install the wheel again, let the user read the file, or `python -m "
    "pip install backports.zstd`. Do not strip or pack it (`strip`, `upx`): that can remove the "
    "section with the GPU code.",
)

EMBEDDED_DIFFERS: Final = Entry(
    "The embedded code differs from the manifest",
    "The library has kernels that the manifest does not list, or the other way round. Manifest "
    "and library come from different builds, or one of them was changed.",
    f"Install the wheel again. `{PROGRAM} audit WHEEL` says whether the wheel itself is at fault.",
)

CHECK_CRASHED: Final = Entry(
    "A check of doctor itself crashed",
    f"This is a bug in {NAME}. The other checks still ran.",
    f"Report it with the page that `{PROGRAM} doctor --report report.html` writes.",
)
