"""Masks as objects: which keys each query attends to, planned for the kernels."""

from .band import Band
from .intervals import IntervalMask
from .plan import MaskPlan
from .spec import BlockMask

__all__ = ["Band", "BlockMask", "IntervalMask", "MaskPlan"]
