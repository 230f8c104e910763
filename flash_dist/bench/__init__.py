"""Speed and memory beside other attentions: shapes, peers, timing, results, plot.

`plan`, `results`, `plot` and, of the baselines, `names`, `shapes` and `sets` need neither torch
nor a GPU.
"""
