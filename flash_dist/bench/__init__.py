"""Measure the speed and memory of our attention and of other attention functions.

These modules need torch: `runner`, `overhead`, those of `measuring` except `timing`, and those of
`baselines` except `names`, `shapes` and `sets`.
"""
