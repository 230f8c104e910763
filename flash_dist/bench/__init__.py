"""Measure the speed and memory of our attention and of other attention functions.

The modules `plan`, `results` and `plot`, and `names`, `shapes` and `sets` of `baselines`, need
neither torch nor a GPU.
"""
