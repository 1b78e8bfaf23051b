"""Every parameter has its own optimizer, stepped by a post-accumulate-grad hook during backward (no gradient is kept)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Wide(nn.Module):
    def __init__(self, d=14, h=28, depth=3):
        super().__init__()
        self.inp = nn.Linear(d, h)
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.SiLU()) for _ in range(depth))
        self.out = nn.Linear(h, d)

    def forward(self, x):
        x = self.inp(x)
        for b in self.body:
            x = x + b(x)
        return self.out(x)


def batch(step, n, d=14):
    """Inverse of a fixed rotation followed by a soft threshold."""
    g = torch.Generator().manual_seed(50_000 + step)
    q = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1)))[0]
    y = torch.randn(n, d, generator=g)
    return nn.functional.softshrink(y, 0.3) @ q, y


class InBackward:
    def __init__(self, model, lr):
        self.opts = {}
        self.lr = lr
        for name, p in model.named_parameters():
            wd = 0.01 if p.ndim > 1 else 0.0
            self.opts[name] = torch.optim.AdamW([p], lr=lr, weight_decay=wd)
            p.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name):
        def run(p):
            opt = self.opts[name]
            opt.step()
            opt.zero_grad()
        return run

    def set_lr(self, factor):
        for o in self.opts.values():
            o.param_groups[0]["lr"] = self.lr * factor

    def state(self, model):
        out = {}
        for name, p in model.named_parameters():
            st = self.opts[name].state.get(p, {})
            out[name] = {k: st.get(k, torch.zeros_like(p.detach())) for k in ("exp_avg", "exp_avg_sq")}
            out[name]["step"] = st.get("step", torch.tensor(0.0))
        return out

    def load(self, model, state):
        for name, p in model.named_parameters():
            self.opts[name].state[p] = dict(state[name])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="inbwd")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = Wide()
    for b in model.body:
        fully_shard(b)
    fully_shard(model)
    opt = InBackward(model, a.lr)
    start = 0
    if a.resume:
        start = max(int(d) for d in os.listdir(a.resume) if d.isdigit())
        sd = {"model": model.state_dict(), "opt": opt.state(model)}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, str(start)))
        model.load_state_dict(sd["model"])
        opt.load(model, sd["opt"])
    for step in range(start, a.steps):
        opt.set_lr(min(1.0, (step + 1) / 5))
        x, y = (t.chunk(world)[rank] for t in batch(step, a.batch))
        loss = nn.functional.smooth_l1_loss(model(x), y)
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
        s = loss.detach().clone()
        dist.all_reduce(s)
        if rank == 0:
            print(f"step {step + 1} loss {s.item() / world:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save({"model": model.state_dict(), "opt": opt.state(model)}, checkpoint_id=os.path.join(a.out, str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
