"""Speed and memory beside other attentions: shapes, peers, timing, results, plot.

`shapes`, `work`, `results`, `files`, `names` and `plot` need neither torch nor a GPU.
"""
