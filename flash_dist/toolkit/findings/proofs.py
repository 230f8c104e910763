"""Ids of findings of the selftest."""

from __future__ import annotations

from typing import Final

from ..product import NAME, PROGRAM
from .entry import Entry

SELFTEST_BITS_DIFFER: Final = Entry(
    "The same call gave different bits",
    "Runs with equal inputs must give equal bits, but one did not. The cause is a race in a "
    "kernel, an instruction that this GPU executes differently, or faulty memory.",
    "Do not rely on results of this device with this build. `nvidia-smi -q -d ECC` counts "
    "errors of its memory. Run the selftest again, and report the output of "
    f"`{PROGRAM} selftest --json`.",
)

SELFTEST_VALUES_DIFFER: Final = Entry(
    "A result is farther from the reference than allowed",
    "The kernel ran, but its numbers are wrong, or their error is more than twice that of torch's "
    "own half precision.",
    "Do not use this device with this build, and report the output of "
    f"`{PROGRAM} selftest --json`, which names the tensor and the place.",
)

SELFTEST_ERROR: Final = Entry(
    "A call of the selftest raised an error",
    "CUDA or torch refused a call. `no kernel image is available` can come from torch's own "
    "kernels, too; `out of memory` can come from other programs on the GPU.",
    f"`{PROGRAM} explain MESSAGE` says what the message means. For memory check "
    "`nvidia-smi`, and run again when the GPU is free.",
)

SELFTEST_CRASHED: Final = Entry(
    "The selftest's process died",
    "The process that ran the kernels was killed or ended without a report. The message names the "
    "signal and the last case. SIGKILL most often means that the system or the container ran out "
    "of memory.",
    f"`{PROGRAM} doctor` says whether the install is sound. `dmesg` shows kills for "
    "lack of memory, and NVIDIA's `Xid` errors.",
)

SELFTEST_TIMEOUT: Final = Entry(
    "The selftest took too long",
    "It was stopped at its time limit. A shared GPU, a debugger or sanitizer, or PTX that the "
    "driver compiles at every start (CUDA_CACHE_DISABLE) makes it slow; a kernel that hangs looks "
    "the same.",
    f"Allow more time: `{PROGRAM} selftest --timeout 3600`. If the same case never "
    "ends on an idle GPU, report it.",
)

SELFTEST_NOT_RUN: Final = Entry(
    "The selftest was not run",
    "This GPU has no code in the build, or the extension does not load, so there was nothing to "
    "test.",
    "Fix the other finding of the same report, which says why.",
)

PREDICTION_DIFFERS: Final = Entry(
    "Other variants ran than predicted",
    "doctor predicts from the library which variant of each kernel a GPU runs, but the dispatcher "
    "chose others. The results were right, but one of the two has a bug.",
    f"Report it with the page that `{PROGRAM} doctor --report report.html` writes.",
)

FINGERPRINT_DIFFERS: Final = Entry(
    "This GPU computes other bits than another GPU of its model",
    "The package holds SHA-256 hashes of what the selftest computed on a GPU of this model. Case, "
    "plan, kernel code, multiprocessors, shared memory and, for code that the driver compiles, the "
    "driver are the same, so the bits must be the same. All runs on this GPU agreed with each "
    "other: it makes the same error each time.",
    f"Run `{PROGRAM} selftest --runs 1000` on it and on other GPUs of this model. If "
    "only this one differs, take it out of use; if all differ, report it: the recorded "
    "fingerprints are wrong.",
)

GPUS_DIFFER: Final = Entry(
    "Two equal GPUs of this machine computed different bits",
    "They are of one model, ran the same code on the same inputs, and one of the two computed "
    "something else. Nothing raised an error: this is silent data corruption.",
    f"A third GPU shows which one is wrong: `torchrun --nproc-per-node=gpu -m {NAME} fleet "
    "--rounds 10`. With only two, it is the one whose bits change between rounds.",
)

FLEET_ODD_GPU: Final = Entry(
    "One GPU of the fleet computes other bits than its peers",
    "Most ranks with the same GPU model and code agree; this one does not. The message names "
    "host, PCI address and UUID of the GPU, the tensor and the case.",
    f"Take the GPU out of the cluster and run `{PROGRAM} selftest --runs 1000` on "
    "it. `nvidia-smi -q -d ECC` and the `Xid` lines of `dmesg` may say more.",
)

FLEET_DISAGREES: Final = Entry(
    "GPUs of the fleet disagree, and none is in the majority",
    "As many ranks computed one result as another, so the fleet cannot say which of them is wrong.",
    "Run it with a third GPU of this model, or with `--rounds 10`: a GPU with occasional errors "
    "disagrees with itself.",
)

FLEET_DIFFERS: Final = Entry(
    "Not all GPUs of the fleet computed the same bits",
    "It sums up the findings above it, one for each GPU that differs.",
    "See those; each has an explanation of its own.",
)

FLEET_NOTHING_TO_COMPARE: Final = Entry(
    "No two ranks of the fleet are equal",
    "Bits are compared between GPUs of one model with the same limits, budget, build and, for "
    "code that the driver compiles, driver. Every rank differs from all others in one of these.",
    "Start at least two ranks on GPUs of one model, with the same wheel and environment.",
)

FLEET_TOO_MANY_RANKS: Final = Entry(
    "There are more ranks on a host than GPUs",
    "Each rank tests the GPU with the number of its local rank, but there is no GPU with this "
    "number.",
    f"`torchrun --nproc-per-node=gpu -m {NAME} fleet` starts one rank per GPU; "
    "CUDA_VISIBLE_DEVICES may hide some.",
)
