"""Entries that explain messages of the dynamic loader, except those about versions.

Sources: glibc's elf/dl-load.c (its messages end with errno's text), musl's ldso/dynlink.c, glibc
2.41 release notes (executable stacks).
"""

from __future__ import annotations

from typing import Final

from ..entry import Entry

LIBRARY_DENIED: Final = Entry(
    "This process has no permission to open a library",
    "The file, or a folder above it, is closed to this user, or SELinux, AppArmor or a sandbox "
    "forbids it. Reinstalling the package as the same user changes nothing.",
    "`namei -l FILE` shows which folder or file is closed. As its owner run `chmod -R a+rX` on "
    "the package's folder, or install into an environment of your own.",
    messages=(
        "{library}: cannot open shared object file: Permission denied",
        "{library}: cannot open shared object file: Operation not permitted",
    ),
    said="this process has no permission to open `{library}`",
)

FILE_LIMIT: Final = Entry(
    "This process has reached its limit of open files",
    "It has as many files open as its limit allows, often because DataLoader workers keep tensors "
    "as files. The library itself is intact.",
    "`ulimit -n 65536` in the shell that starts the program, or LimitNOFILE of the service. For "
    'DataLoader `torch.multiprocessing.set_sharing_strategy("file_system")` needs fewer files.',
    messages=(
        "{library}: cannot open shared object file: Too many open files",
        "OSError: [Errno 24] Too many open files",
    ),
)

FILE_SYSTEM_FAILS: Final = Entry(
    "The file system of a library fails",
    "The library exists there but cannot be read. `Stale file handle`: it was replaced on a "
    "network disk while it was open, as by an install on another host. `Input/output error`, "
    "`Transport endpoint is not connected`: the disk, the network or its server fails.",
    "Start the program again. If it happens again, `sudo dmesg | tail` or the operator of the "
    "file system can say why. Use an environment on a local disk to avoid it.",
    messages=(
        "{library}: cannot open shared object file: Stale file handle",
        "{library}: cannot open shared object file: Input/output error",
        "{library}: cannot open shared object file: Remote I/O error",
        "{library}: cannot open shared object file: Transport endpoint is not connected",
        "{library}: cannot open shared object file: No such device",
    ),
    said="the file system of `{library}` fails",
)

LIBRARY_UNOPENED: Final = Entry(
    "The system cannot open a library that exists",
    "The end of the message is the system's reason, such as a circular link, a folder in place of "
    "the file, or too little memory. Only `No such file or directory` means that the file is "
    "missing.",
    "`ls -lL FILE` with the name of the message shows the same error. Once it can read the file, "
    "so can the loader.",
    messages=(
        "{library}: cannot open shared object file: Too many levels of symbolic links",
        "{library}: cannot open shared object file: Not a directory",
        "{library}: cannot open shared object file: Cannot allocate memory",
        "{library}: cannot open shared object file: File name too long",
        "{library}: cannot open shared object file: {reason}",
        "{library}: cannot read file data: {reason}",
    ),
    said="the system cannot open `{library}`, although it exists",
)

MAP_REFUSED: Final = Entry(
    "A library cannot be loaded from its folder",
    "The loader could read the file but not map it as code: its file system is mounted `noexec`, "
    "as `/tmp` or a home folder often is, SELinux forbids it, or this process has a limit of "
    "memory (`ulimit -v`).",
    "`findmnt -T FILE` shows `noexec` among the options: create the environment on another disk, "
    "and for code compiled at run time set TMPDIR, TRITON_CACHE_DIR and TORCH_EXTENSIONS_DIR.",
    messages=("failed to map segment from shared object", "cannot create shared object descriptor"),
)

STATIC_TLS: Final = Entry(
    "No room is left for a library's thread-local variables",
    "The loader reserves a small block for libraries that need thread-local variables at a fixed "
    "place, most often libgomp. Libraries that were loaded earlier have used it up.",
    "Import that package first, or name the library of the message: "
    "`export LD_PRELOAD=/path/of/libgomp.so.1`. From glibc 2.33 on "
    "`export GLIBC_TUNABLES=glibc.rtld.optional_static_tls=16384` makes the block larger.",
    messages=("cannot allocate memory in static TLS block",),
)

EXECUTABLE_STACK: Final = Entry(
    "A library asks for an executable stack, which the system refuses",
    "It was linked with an assembler file that lacks the note about its stack. Kernels with "
    "SELinux and glibc from 2.41 on refuse to make the stack executable for a library that is "
    "loaded later. The library rarely needs that.",
    "Install a newer version of the package. Until there is one: "
    "`patchelf --clear-execstack FILE` on the library of the message.",
    messages=(
        "cannot enable executable stack as shared object requires",
        "cannot change memory protections",
    ),
)

PAGE_SIZE: Final = Entry(
    "A library is laid out for smaller pages than this system's",
    "Arm kernels may have pages of 16 or 64 KiB, and the library was linked for 4 KiB. On x86_64 "
    "the file was damaged, most often by a tool that edits libraries (patchelf, strip).",
    "`getconf PAGESIZE` shows the size: above 4096 boot a kernel with pages of 4 KiB, or build the "
    "package on this machine. At 4096 install the package again.",
    messages=("ELF load command address/offset not",),
)

MUSL: Final = Entry(
    "A library for glibc is loaded on a system with musl",
    "The message is of musl, the C library of Alpine Linux. Packages with CUDA code, torch and "
    "this one are compiled for glibc, and no compatibility package makes up for what musl lacks.",
    "Use a glibc distribution such as Debian or Ubuntu; of container images `python:3.12-slim` "
    "instead of `python:3.12-alpine`.",
    messages=("Error relocating", "Error loading shared library {library}"),
)

CPU_TOO_OLD: Final = Entry(
    "The processor does not support an instruction of the program",
    "A package was compiled for newer processors (AVX2, AVX-512), or for this machine's real one "
    "while the process runs in an emulator or in a virtual machine that hides features. Under "
    "macOS it is an x86_64 Python on an Arm processor.",
    "`lscpu | grep -o avx2` prints nothing on a processor that is too old for torch's wheels. In "
    "a virtual machine use the host's processor type.",
    messages=(
        "illegal hardware instruction",
        "Illegal instruction (core dumped)",
        "died with <Signals.SIGILL",
    ),
)

TORCH_OLD_ABI: Final = Entry(
    "The library is built for a torch of the old C++ ABI",
    "Its symbols take std::string as g++ had it before version 5 (`Ss`). torch's wheels dropped "
    "it with 2.6 and 2.7, so the package was compiled for an older torch, or with "
    "`-D_GLIBCXX_USE_CXX11_ABI=0`; in file names of flash-attention it is `cxx11abiFALSE`.",
    "`python -c 'import torch; print(torch._C._GLIBCXX_USE_CXX11_ABI)'` prints True for a torch "
    "with the new ABI: install the package's build for it (`cxx11abiTRUE`), or compile it again.",
    messages=("undefined symbol: {old_abi_symbol}",),
    said="the library is built for a torch of the old C++ ABI: `{old_abi_symbol}` is not in the "
    "installed one",
)
