"""python check.py SITE SECONDS: dropout of the package in SITE. Prints BAD lines with the cause, and one line of counts."""
import os, sys, time, itertools
site, limit = sys.argv[1], float(sys.argv[2]); sys.path.insert(0, site)
import torch, flash_dist
from flash_dist.kernels.dropout import draw_rng_state, count_kept, dropped, Dropout
D = torch.device("cuda", 0); t0 = time.time(); bad = good = 0; used = set(); B, H, F = torch.bfloat16, torch.float16, torch.float32
MOST = {B: .02, H: .004, F: 2e-5}
def say(*a): print(f"{time.time()-t0:5.1f}", *a, flush=True)
def poison():
    x = [torch.full((n,), float("nan"), device=D) for n in (1 << 24, 1 << 22, 1 << 20, 1 << 16)]; del x
def verdict(name, ok, *more):
    global bad, good
    good, bad = good + bool(ok), bad + (not ok)
    if not ok: say("BAD ", name, *more)
def over(): return time.time() - t0 > limit
def collect(): used.update(x.get("symbol", "")[11:] for x in flash_dist.last_variant().values() if "dropout" in x.get("symbol", "") or "dq_gemm" in x.get("symbol", ""))
def gone_of(seed, h, b, sq, sk, p, cpu=False):
    torch.manual_seed(seed); s = draw_rng_state(D)
    return dropped(Dropout(p, s.cpu() if cpu else s), h, range(b), sq, sk).to(D)
def differ(a, b):
    i = (a != b).nonzero(); return f"{len(i)} of {a.numel()} differ, first {i[0].tolist()}" if len(i) else ""
def guarded(name, f, *a, **k):
    if over(): return say("left out", name)
    try: f(*a, **k)
    except Exception as e: verdict(name, False, type(e).__name__, str(e).replace("\n", " ")[:300])
# 1. which weights the forward and dV drop, against the CPU
def masks(dt, d, b, h, sq, sk, p=.37, seed=5):
    torch.manual_seed(1); q, k = (torch.randn(b, s, h, d, device=D, dtype=dt) * .1 for s in (sq, sk)); v1 = torch.randn(b, sk, h, d, device=D, dtype=dt, requires_grad=True)
    want = gone_of(seed, h, b, sq, sk, p, cpu=True); fwd, dv = torch.zeros_like(want), torch.zeros_like(want)
    for at in range(0, sk, d):
        n = min(d, sk - at); v = torch.zeros(b, sk, h, d, device=D, dtype=dt); v[:, at:at + n, :, :n] = torch.eye(n, device=D, dtype=dt)[:, None]
        poison(); torch.manual_seed(seed); out = flash_dist.flash_attn_func(q, k, v, p); fwd[..., at:at + n] = (out[..., :n] == 0).permute(0, 2, 1, 3)
    for at in range(0, sq, d):
        n = min(d, sq - at); do = torch.zeros(b, sq, h, d, device=D, dtype=dt); do[:, at:at + n, :, :n] = torch.eye(n, device=D, dtype=dt)[:, None]
        torch.manual_seed(seed); out = flash_dist.flash_attn_func(q, k, v1, p); poison()
        dv[..., at:at + n, :] = (torch.autograd.grad(out, (v1,), do)[0][..., :n] == 0).permute(0, 2, 3, 1)
    collect(); name = f"mask {str(dt)[6:]} d{d} {b}x{h} {sq}x{sk}"
    verdict(name + " forward", torch.equal(fwd, want), differ(fwd, want)); verdict(name + " dV", torch.equal(dv, want), differ(dv, want))
# 2. float64 with the mask given; two runs
def reference(q, k, v, do, gone, p, vis=None, slopes=None, bias=None):
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *([bias] if bias is not None else []))]; q, k, v = leaves[:3]
    g = q.shape[2] // k.shape[2]; kk, vv = (x.repeat_interleave(g, 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, kk) * q.shape[-1] ** -.5; sq, sk = s.shape[-2:]
    if slopes is not None: s = s - (torch.arange(sk - sq, sk, device=D)[:, None] - torch.arange(sk, device=D)).abs() * slopes.double()[:, None, None]
    if bias is not None: s = s + leaves[3]
    if vis is not None: s = s.masked_fill(~vis, -torch.inf)
    w = s.softmax(-1).nan_to_num(0.).masked_fill(gone, 0.) * (65536 / count_kept(p)); o = torch.einsum("bhqk,bkhd->bqhd", w, vv)
    return (o, *torch.autograd.grad(o, leaves, do.double())), s.logsumexp(-1)
def compare(name, dt, d, b, sq, sk, h, hk, p=.2, causal=False, window=None, env=None, mask=None, dense=None, bias=None, dv=None, **how):
    torch.manual_seed(2); dv = dv or d
    q, k, v = (torch.randn(b, s, n, c, device=D, dtype=dt, requires_grad=True) for s, n, c in ((sq, h, d), (sk, hk, d), (sk, hk, dv))); do = torch.randn(b, sq, h, dv, device=D, dtype=dt)
    if bias: bias = torch.randn(*bias, device=D, dtype=how.pop("bias_dtype", dt), requires_grad=True)
    i = torch.arange(sk - sq, sk, device=D)[:, None]; j = torch.arange(sk, device=D); vis = dense
    if causal: vis = j <= i
    if window: vis = (j <= i + window[1]) & (j >= i - window[0])
    if env is not None: os.environ["FLASH_DIST_WORKSPACE_MB"] = env
    kw = dict(mask=mask) if mask is not None else dict(causal=causal, window_size=window or (-1, -1))
    if bias is not None: kw["bias"] = bias
    leaves = (q, k, v, *([bias] if bias is not None else [])); runs = []
    for _ in range(2):
        poison(); torch.manual_seed(9); out, lse = flash_dist.flash_attn_func(q, k, v, p, return_lse=True, **kw, **how); poison()
        runs.append((out, *torch.autograd.grad(out, leaves, do))); collect()
    os.environ.pop("FLASH_DIST_WORKSPACE_MB", None)
    want, wlse = reference(q, k, v, do, gone_of(9, h, b, sq, sk, p), p, vis, how.get("alibi_slopes"), bias)
    errs = [((x.double() - y).abs().max() / y.abs().max()).item() for x, y in zip(runs[0], want)]
    same = all(torch.equal(x, y) for x, y in zip(*runs)); fin = wlse.isfinite(); e = (lse.double() - wlse)[fin].abs().max().item()
    verdict(f"f64 {str(dt)[6:]} d{d} {name}", same and max(errs) < MOST[dt] and e < 1e-2, "out dq dk dv (dbias):", " ".join(f"{x:.1e}" for x in errs), f"lse {e:.1e}", "" if same else "RUNS DIFFER")
for dt, d in ((B, 64), (B, 128), (H, 128), (F, 64), (B, 256), (F, 128), (H, 64), (H, 40), (F, 256)):
    guarded(f"masks {dt} d{d}", masks, dt, d, 2, 3, 130, 133)
for dt, d in itertools.product((B, H, F), (64, 128)):
    guarded("full", compare, "full gqa", dt, d, 2, 200, 300, 4, 2)
    guarded("recompute", compare, "causal, no workspace", dt, d, 1, 333, 333, 4, 4, causal=True, env="0")
    guarded("short", compare, "short", dt, d, 3, 50, 60, 2, 2, causal=True)
for dt, d in ((B, 256), (H, 192), (F, 256), (B, 96), (B, 32)):
    guarded("sizes", compare, "causal gqa", dt, d, 1, 200, 150, 4, 1, causal=True); guarded("sizes", compare, "no workspace", dt, d, 1, 129, 193, 2, 2, env="0")
slopes = torch.tensor([.5, .2, .1, .02], device=D); dense = torch.rand(300, 300) < .4; dense[:, :2] = True; dense[:128, 128:256] = True
guarded("columns", compare, "192/128", B, 192, 1, 150, 200, 4, 2, dv=128, causal=True)
guarded("window", compare, "window", B, 128, 1, 500, 700, 4, 1, window=(100, 20))
guarded("memory", compare, "8 MiB", B, 64, 2, 1500, 1500, 4, 2, causal=True, env="8")
guarded("few", compare, "few queries", B, 64, 1, 5, 3000, 4, 2)
for dt in (B, F): guarded("alibi", compare, "alibi", dt, 64, 1, 300, 300, 4, 2, causal=True, alibi_slopes=slopes)
guarded("invariant", compare, "batch_invariant", B, 128, 2, 300, 300, 4, 2, causal=True, batch_invariant=True)
guarded("list", compare, "list of tiles", B, 128, 2, 300, 300, 4, 2, mask=flash_dist.BlockMask.from_dense(dense), dense=dense.to(D))
for dt in (B, H, F):
    guarded("bias", compare, "bias", dt, 64, 2, 150, 190, 4, 2, bias=(1, 4, 150, 190)); guarded("bias", compare, "bias of keys, causal", dt, 128, 2, 190, 190, 4, 4, causal=True, bias=(2, 1, 1, 190))
guarded("bias", compare, "bias fp32 of a batch", B, 64, 2, 150, 190, 4, 2, bias=(2, 4, 150, 190), bias_dtype=F)
for p in (1e-4, .9): guarded("p", compare, f"p {p}", B, 64, 1, 300, 300, 4, 2, p=p)
# 3. packs: documents drop by their number
def packs(dt, d):
    torch.manual_seed(3); ends = [0, 100, 100, 277, 300]; cu = torch.tensor(ends, device=D, dtype=torch.int32)
    q, k, v = (torch.randn(300, n, d, device=D, dtype=dt, requires_grad=True) for n in (4, 2, 2)); do = torch.randn_like(q)
    torch.manual_seed(9); out = flash_dist.flash_attn_varlen_func(q, k, v, cu, cu, 177, 177, .2, causal=True); g = torch.autograd.grad(out, (q, k, v), do)
    gone = gone_of(9, 4, 4, 177, 177, .2); worst = 0
    for i, (a, e) in enumerate(itertools.pairwise(ends)):
        n = e - a
        if n == 0: continue
        want, _ = reference(*(t[a:e].unsqueeze(0) for t in (q, k, v, do)), gone[i:i + 1, :, :n, :n], .2, torch.ones(n, n, device=D, dtype=torch.bool).tril())
        worst = max([worst] + [((y[a:e].double() - w[0]).abs().max() / w.abs().max()).item() for y, w in zip((out, *g), want)])
    verdict(f"packs {dt} d{d}", worst < MOST[dt], f"{worst:.1e}")
for dt, d in ((B, 64), (H, 128), (F, 64)): guarded("packs", packs, dt, d)
# 4. bits, graphs, probabilities
def bits():
    q, k, v = (torch.randn(2, 512, 4, 128, device=D, dtype=B, requires_grad=True) for _ in range(3)); do = torch.randn_like(q); first, n = None, 0
    for i in range(200):
        torch.manual_seed(4); o = flash_dist.flash_attn_func(q, k, v, .1, causal=True); r = (o, *torch.autograd.grad(o, (q, k, v), do)); first = first or r
        n += not all(torch.equal(x, y) for x, y in zip(r, first))
    verdict("200 runs", n == 0, n, "differ")
def graph():
    q, k, v = (torch.randn(2, 256, 4, 64, device=D, dtype=B) for _ in range(3)); flash_dist.flash_attn_func(q, k, v, .2); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): o = flash_dist.flash_attn_func(q, k, v, .2)
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        for _ in range(2): g.replay(); outs.append(o.clone())
    verdict("graph draws anew", not torch.equal(outs[0], outs[1])); verdict("graph repeats by seed", torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3]))
def probs():
    q, k, v = (torch.randn(2, 70, 4, 64, device=D, dtype=H) for _ in range(3)); torch.manual_seed(3); _, _, s = flash_dist.flash_attn_func(q, k, v, .3, return_attn_probs=True)
    torch.manual_seed(3); gone = flash_dist.dropout_mask(.3, (2, 4, 70, 70), device=D); verdict("S_dmask", torch.equal(s < 0, gone & (s != 0)) and abs(gone.float().mean().item() - .3) < .02, differ(s < 0, gone))
for f in (bits, graph, probs): guarded(f.__name__, f)
say(f"check of {os.path.basename(site)}: {good} good, {bad} BAD;", torch.cuda.get_device_name(), "; kernels", *sorted(used))
sys.exit(bad > 0)
