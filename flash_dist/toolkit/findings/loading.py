"""Ids of findings about loading compiled libraries of any package, predicted or tried."""

from __future__ import annotations

from typing import Final

from ..product import FOLDER, KERNELS, PROGRAM
from .entry import Entry

EXTENSION_ABSENT: Final = Entry(
    "There is no library to load",
    "No compiled library was found, so doctor did not try to load one.",
    "The finding on the build says what is missing.",
)

EXTENSION_NEEDS_TORCH: Final = Entry(
    "The extension was not loaded: torch is not installed",
    "The kernel library loads without torch. The extension with the operators needs torch, which "
    "is not installed.",
    "Install torch, then run doctor again.",
)

WRONG_ARCHITECTURE: Final = Entry(
    "The library is compiled for another processor",
    "Its header names another kind of CPU than the one that Python runs on, such as aarch64 "
    "for x86_64. The loader's own message is `wrong ELF class` or `cannot open shared object "
    "file`.",
    "Install the build for this machine. In an emulated container (`docker run --platform`) use "
    "an image for the machine's own processor.",
    messages=("wrong ELF class", "cannot open shared object file: Exec format error"),
)

LIBRARY_DAMAGED: Final = Entry(
    "The file is not a Linux library",
    "It does not start like one. The download was cut short, the disk is full, it is a Git LFS "
    "pointer or an error page saved under its name, or it was made for Windows or macOS.",
    "Install the same version again, from the index that it came from: "
    "`python -m pip install --force-reinstall --no-deps NAME==VERSION`. "
    f"`{PROGRAM} inspect FILE` says what a file is.",
    messages=("invalid ELF header", "{library}: file too short"),
)

PYTHON_ABI: Final = Entry(
    "The library is compiled for another Python",
    "The tag in its file name (`cpython-310`), that of its wheel, or a symbol it calls belongs to "
    "another version of Python. Libraries with `abi3` in the name work with every version from "
    "one on, others with exactly one.",
    "Take folders of another Python out of PYTHONPATH. Then install the package again with the "
    "Python that runs: `python -m pip install --force-reinstall --no-deps NAME==VERSION`. Where "
    "no wheel exists for that version, use the Python that the message names.",
    messages=(
        "undefined symbol: {python_symbol}",
        "dynamic module does not define module export function",
    ),
)

GLIBC_TOO_OLD: Final = Entry(
    "The system's C library is older than the library needs",
    "A library needs at least the glibc of the system that it was linked on, or the one that "
    "its wheel promises (manylinux_2_34 is glibc 2.34). glibc belongs to the distribution and "
    "cannot be upgraded alone.",
    "Use a newer distribution or container image, or a build that was made for an older one.",
    messages=("version `GLIBC_{version}' not found",),
    said="the library needs glibc {version} or newer, and this system's is older",
)

LIBSTDCXX_TOO_OLD: Final = Entry(
    "The C++ library is older than the library needs",
    "It was compiled by a newer g++ than the libstdc++.so.6 that would be loaded: that of the "
    "system, of a conda environment, or in a folder of LD_LIBRARY_PATH.",
    "Take folders with an old copy out of LD_LIBRARY_PATH. In a conda environment `conda install "
    "-c conda-forge libstdcxx-ng` brings a newer one. A distribution does not update its "
    "libstdc++ to a newer g++: use a newer distribution or image, or a build that was made for "
    "this one.",
    messages=("version `GLIBCXX_{version}' not found", "version `CXXABI_{version}' not found"),
)

LIBRARY_TOO_OLD: Final = Entry(
    "A required library is too old",
    "The loader finds the file, but it lacks the required symbol version.",
    "Install the newer version that the message names. LD_LIBRARY_PATH may have an old copy: try "
    "again after `unset LD_LIBRARY_PATH`.",
    messages=(
        "undefined symbol: {symbol}, version {library}",
        "{library}: version `{version}' not found",
    ),
)

LIBRARY_BROKEN: Final = Entry(
    "A required library was found but cannot be loaded",
    "The loader takes the first file of that name. If it is empty, truncated or not a library, "
    "the loader fails and does not search on. LD_LIBRARY_PATH and LD_PRELOAD come before the "
    "system's folders.",
    "Remove the folder that the message names from LD_LIBRARY_PATH, or reinstall the package that "
    "the file belongs to.",
)

LIBRARY_MISSING: Final = Entry(
    "A required library was not found",
    "The loader searches the library's own RUNPATH, LD_LIBRARY_PATH, its cache and the system's "
    "folders. Libraries of CUDA often come with torch, and are found only after `import torch`.",
    "Install the package that has the file, in the version of its number: libcudart.so.12 is CUDA "
    "12. If it is a library of CUDA, install the build for the CUDA of your torch.",
    messages=(
        "{library}: cannot open shared object file",
        "{library}: cannot open shared object file: No such file or directory",
    ),
    said="a required library was not found: `{library}`",
)

TORCH_LIBRARY_MISSING: Final = Entry(
    "The library needs a part of torch that is missing",
    "`libc10_cuda.so` and `libtorch_cuda.so` come with a torch that has CUDA, and are found after "
    "`import torch`. Others (`libtorch_cuda_cu.so`) existed only in some versions: the package "
    "was built for one of those.",
    "`python -c 'import torch; print(torch.__version__, torch.version.cuda)'` shows the installed "
    "build: None is a torch without CUDA. Install the build of the package for this torch, or "
    "compile it again.",
    messages=(
        "{torch_library}: cannot open shared object file",
        "{torch_library}: cannot open shared object file: No such file or directory",
    ),
    said="the library needs `{torch_library}`, a part of torch that is missing",
)

TORCH_SYMBOL_MISSING: Final = Entry(
    "The library is built for another torch",
    "It calls functions that the installed torch does not have. torch's C++ interface changes "
    "with every minor version, so most extensions work with one of them; builds for the stable "
    "ABI work with all newer ones.",
    "Install the build of that package for your torch, or the torch that it was built for, or "
    "compile it against yours: "
    "`pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation --no-binary "
    "NAME NAME`.",
    messages=("undefined symbol: {torch_symbol}", "xFormers can't load C++/CUDA extensions"),
    said="the library is built for another torch: `{torch_symbol}` is not in the installed one",
)

UNDEFINED_SYMBOL: Final = Entry(
    "A library was compiled for another version of a dependency",
    "The loader found no library that defines the symbol. Its first letters often name its "
    "library: `nccl`, `cublas`, `cudnn`, `Py`.",
    "Install the build of that package for the installed versions, or compile it against them: "
    "`pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation --no-binary "
    "NAME NAME`.",
    messages=("undefined symbol: {symbol}",),
    said="the library was compiled for another version of a dependency: `{symbol}` is missing",
)

TORCHVISION_DIFFERS: Final = Entry(
    "torchvision does not belong to this torch",
    "Each version of torchvision and torchaudio is compiled for one version of torch, and for "
    "its CUDA or CPU build. With another one its operators are not registered.",
    "Keep torch and let pip find the torchvision that belongs to it, in the index that torch came "
    "from: `pip install --upgrade torchvision torch==VERSION --index-url INDEX`. "
    "`python -m pip show torch` names its version; `+cu130` behind it is "
    "https://download.pytorch.org/whl/cu130.",
    messages=("operator torchvision::nms does not exist", "No such operator torchvision::nms"),
)

DLL_LOAD_FAILED: Final = Entry(
    "Windows cannot load a compiled library",
    "`module could not be found`: a DLL that it needs is absent, such as those of CUDA, torch or "
    "Visual C++. `procedure could not be found`: one has another version, most often torch. "
    "Libraries of this package are for Linux only; under Windows use WSL 2.",
    "Import torch first. Install the build of the package for this torch, CUDA and Python, and "
    "Microsoft's Visual C++ Redistributable.",
    messages=(
        "DLL load failed while importing {module}",
        "{file}.dll or one of its dependencies",
        "DLL load failed: ",
    ),
    said="Windows cannot load the compiled library `{module}`",
)

GIL_ENABLED: Final = Entry(
    "A free-threaded Python enabled its lock (GIL) again",
    "Python 3.13t and newer run without the global interpreter lock, until they load a compiled "
    "module that does not declare support for that. It is a warning: everything works, one thread "
    "at a time.",
    "Nothing, or a newer version of the module. `python -c 'import sysconfig; "
    'print(sysconfig.get_config_var("Py_GIL_DISABLED"))\'` prints 1 for such a Python.',
    messages=("The global interpreter lock (GIL) has been enabled to load module",),
)

LOADING_UNKNOWN: Final = Entry(
    "Loading could not be predicted from the symbol tables",
    "A file that decides it could not be read. This is neither a failure nor a proof.",
    f"`{PROGRAM} doctor`, without `--no-selftest`, loads them.",
)

LOAD_PREDICTION_DIFFERS: Final = Entry(
    "Loading did not go as predicted",
    "The prediction from symbol tables differs from what happened in a process that loaded the "
    "libraries. The process is right; the prediction missed something.",
    f"Report it with the page that `{PROGRAM} doctor --report report.html` writes.",
)

KERNELS_FAILED: Final = Entry(
    "The kernel library does not load",
    f"The dynamic loader refused `{KERNELS}`; its message names the cause: a "
    "library or a version of one that is absent, or a file of another architecture.",
    "Install the wheel again. `GLIBC_2.x not found` means that the system is older than the "
    "one that the wheel was built on: use a newer one, or build the wheel here.",
)

KERNELS_CRASHED: Final = Entry(
    "Loading the kernel library crashed its process",
    "A process that did nothing but load the library died. Most often the file is damaged, or a "
    "library that LD_PRELOAD or LD_LIBRARY_PATH names is loaded instead of the right one.",
    "`unset LD_PRELOAD LD_LIBRARY_PATH` and try again, then install the wheel again.",
)

TORCH_FAILED: Final = Entry(
    "torch cannot be imported",
    "The kernel library loads, but `import torch` fails. The message is torch's own: often a CUDA "
    "library of another version on LD_LIBRARY_PATH, or a broken install.",
    "`python -c 'import torch'` shows the whole message. `unset LD_LIBRARY_PATH` helps if a "
    "system-wide CUDA is found before torch's; otherwise reinstall torch.",
)

TORCH_CRASHED: Final = Entry(
    "Importing torch crashed its process",
    "The process died inside `import torch`, before anything of this package was loaded.",
    "Reinstall torch. On an old processor check for the instructions that torch is compiled for "
    "(AVX2): `grep -c avx2 /proc/cpuinfo`.",
)

EXTENSION_FAILED: Final = Entry(
    "The extension does not load",
    "torch imports, but the loader refuses `_C.so`, most often because of a symbol that this "
    "torch does not have, or a library that is absent.",
    f"Install the wheel again, then check the finding on torch's version. `{PROGRAM} "
    "explain MESSAGE` says what a loader's message means.",
)

EXTENSION_CRASHED: Final = Entry(
    "Loading the extension crashed its process",
    "The process died while it registered the operators. Two copies of the extension, or one "
    "compiled for another torch, can cause that.",
    "Look for a second copy (`install-twice`), and install the wheel again.",
)

CHILD_CRASHED: Final = Entry(
    "The process that loads the libraries did not start",
    "doctor starts a second Python to load the libraries, where a crash does no harm. It ended "
    "before it reported anything: out of memory, a full folder of temporary files, a limit on "
    "processes, or a Python that does not start.",
    f"`python -m {FOLDER}.loading.child --report /dev/stdout` shows what happens. Set "
    "TMPDIR to use another folder for temporary files.",
)
