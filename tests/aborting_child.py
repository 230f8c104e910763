"""Child of a selftest whose first kernel hits a device-side assertion and loses the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flash_dist.proof.inputs import Inputs
from flash_dist.toolkit.selftest import child

if TYPE_CHECKING:
    from flash_dist.toolkit.selftest.comparison import Tensors


def attend(self: Inputs, *_: object) -> Tensors:
    """Fail on the GPU instead of computing."""
    torch._assert_async(torch.zeros(1, device=self.q.device))
    torch.cuda.synchronize()
    return {}


if __name__ == "__main__":
    setattr(Inputs, "attend", attend)  # noqa: B010 - of another signature
    child.main()
