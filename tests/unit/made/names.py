"""Names in the wheels of this package."""

from __future__ import annotations

from flash_dist.toolkit.builds.contents import LIBRARIES
from flash_dist.toolkit.builds.entry_points import write_entry_points
from flash_dist.toolkit.builds.linkage import TORCH_LIBRARIES
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.product import PRODUCT

KERNELS, BINDING = LIBRARIES
BINDING_NEEDS = TORCH_LIBRARIES | {PRODUCT.library}
ENTRY_POINTS = write_entry_points(load_project().scripts, load_project().entry_points)
