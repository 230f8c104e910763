"""Speed and memory beside other attentions: shapes, peers, timing, results, plot.

`results`, `plot` and, of the contenders, `names` and `shapes` need neither torch nor a GPU.
"""
