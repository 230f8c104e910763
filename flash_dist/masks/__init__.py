"""Masks as objects: what each query may see, planned for the kernels on the CPU."""

from .band import Band
from .plan import MaskPlan
from .spec import BlockMask

__all__ = ["Band", "BlockMask", "MaskPlan"]
