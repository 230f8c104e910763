"""Names in the wheels of this package."""

from __future__ import annotations

from flash_dist.toolkit.builds.console_script import write_scripts
from flash_dist.toolkit.builds.contents import LIBRARIES
from flash_dist.toolkit.builds.linkage import TORCH_LIBRARIES
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.product import PRODUCT

KERNELS, BINDING = LIBRARIES
BINDING_NEEDS = TORCH_LIBRARIES | {PRODUCT.library}
ENTRY_POINTS = write_scripts(load_project().scripts)
