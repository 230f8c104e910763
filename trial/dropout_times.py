"""python times.py SITE LABEL [d64] [d128] [drop]: forward and backward in microseconds, without and with dropout of 0.1."""
import sys; site, label, *what = sys.argv[1:]; sys.path.insert(0, site)
import torch, flash_dist
D = torch.device("cuda", 0)
def timed(f, n, rounds=4):
    for _ in range(3): f()
    best = 1e9
    for _ in range(rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record()
        for _ in range(n): f()
        b.record(); b.synchronize(); best = min(best, a.elapsed_time(b) / n)
    return best * 1e3
def short(): return " ".join(x.get("symbol", "?")[11:].replace("_bf16", "") for x in flash_dist.last_variant().values())
for d in (64, 128):
    if f"d{d}" not in what: continue
    for causal in (False, True):
        q, k, v = (torch.randn(4, 4096, 1024 // d, d, device=D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)); do = torch.randn_like(q); row = f"{label:12} d{d:<3} {'causal' if causal else 'full  '}"; last = None
        for p in ((0., .1) if "drop" in what else (0.,)):
            f = lambda: flash_dist.flash_attn_func(q, k, v, p, causal=causal)
            with torch.no_grad(): t = timed(f, 10)
            o = f(); tb = timed(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), 6); last = last or (t, tb)
            row += f" | p={p}: fwd {t:6.0f} bwd {tb:6.0f}" + (f" ratio {t/last[0]:.3f} {tb/last[1]:.3f}" if p else "")
            if not causal: row += f" [{short()}]"
        print(row, flush=True)
