"""Speed and memory beside other attentions: shapes, peers, timing, results, plot.

`plan`, `results`, `plot` and, of the contenders, `names`, `shapes` and `sets` need neither torch
nor a GPU.
"""
