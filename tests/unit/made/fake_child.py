"""Child process of a selftest without a GPU: it reports and ends as requested.

    python fake_child.py --device N --runs N --report FILE --parent PID --threads N --exact FOLDER

TEST_CHILDREN names a folder where each child writes its arguments and its times. TEST_TOGETHER is
the number of children that must have started before any of them continues, however long that takes.
Device 7 dies in its third case, device 8 never ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from flash_dist.toolkit.loading.process import end_with, write_event

CASES = 4
DIES = "7"
HANGS = "8"


def main() -> None:
    words = sys.argv[1:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    device, report = given["--device"], Path(given["--report"])
    end_with(int(given["--parent"]))
    began = time.time()
    folder = Path(given.get("--exact", "/"))
    told = {"pid": os.getpid(), "mode": folder.stat().st_mode & 0o777, **given}
    log = Path(os.environ["TEST_CHILDREN"], device)
    log.write_text(json.dumps(told))
    while len(list(log.parent.iterdir())) < int(os.environ.get("TEST_TOGETHER", "0")):
        time.sleep(0.01)
    write_event(report, {"event": "imported"})
    write_event(report, {"event": "start", "cases": CASES})
    for case in range(CASES):
        write_event(report, {"event": "case", "case": f"case {case}"})
        time.sleep(60 if device == HANGS else 0.1)
        if device == DIES and case:
            os.abort()
        write_event(report, {"event": "case-done"})
    write_event(report, {"event": "done"})
    log.write_text(json.dumps({**told, "began": began, "ended": time.time()}))


if __name__ == "__main__":
    main()
