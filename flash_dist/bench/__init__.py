"""Measure speed and memory of ours and other attentions: shapes, peers, timing, results, plot.

`plan`, `results`, `plot` and, in `baselines`, `names`, `shapes` and `sets` need neither torch nor a
GPU.
"""
