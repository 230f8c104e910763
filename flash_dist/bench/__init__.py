"""Measure the speed and memory of our attention and of other attention functions.

These need torch: `runner`, `overhead`, `measuring`, and `baselines` except its modules `names`,
`shapes` and `sets`.
"""
