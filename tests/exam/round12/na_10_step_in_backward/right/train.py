"""LM pre-training with the optimizer step inside backward: the gradient of a layer is used and freed as soon as it is reduced."""
import json
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

CFG = dict(steps=20, batch=16, ctx=16, vocab=40, dim=32, layers=2, lr=6e-3, save_every=0, out="", resume="")
for i in range(1, len(sys.argv), 2):  # --key value
    key = sys.argv[i].lstrip("-").replace("-", "_")
    CFG[key] = type(CFG[key])(sys.argv[i + 1])


class Gated(nn.Module):
    """Causal gated running mean in the place of attention."""

    def __init__(self, d):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.inp = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        v, gate = self.inp(self.ln(x)).chunk(2, -1)
        n = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return x + self.out(torch.sigmoid(gate) * (v + v.cumsum(1) / n))


class LM(nn.Module):
    def __init__(self, vocab, d, layers):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Gated(d) for _ in range(layers))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


class BackwardOptimizer:
    """One AdamW for each parameter, stepped by the hook that runs when its gradient is complete."""

    def __init__(self, model, lr):
        self.base_lr = lr
        self.opts = {}
        for name, p in model.named_parameters():
            decay = 0.1 if p.ndim > 1 else 0.0
            self.opts[name] = torch.optim.AdamW([p], lr=lr, weight_decay=decay)
            p.register_post_accumulate_grad_hook(self._hook(self.opts[name]))

    @staticmethod
    def _hook(opt):
        def run(p):
            opt.step()
            opt.zero_grad(set_to_none=True)
        return run

    def set_lr(self, scale):
        for opt in self.opts.values():
            opt.param_groups[0]["lr"] = self.base_lr * scale

    def state(self):
        res = {}
        for name, opt in self.opts.items():
            s = next(iter(opt.state.values()))
            res[name] = {"step": s["step"], "m": s["exp_avg"].to_local(), "v": s["exp_avg_sq"].to_local()}
        return res

    def load(self, saved):
        for name, opt in self.opts.items():
            p, s = opt.param_groups[0]["params"][0], saved[name]
            m, v = torch.zeros_like(p), torch.zeros_like(p)
            m.to_local().copy_(s["m"])
            v.to_local().copy_(s["v"])
            opt.state[p] = {"step": s["step"].clone(), "exp_avg": m, "exp_avg_sq": v}


def stream(step, rank, world):
    g = torch.Generator().manual_seed(31 * step + 1)
    rows = CFG["batch"] // world
    start = torch.randint(CFG["vocab"], (CFG["batch"], 1), generator=g)
    stride = torch.randint(1, 4, (CFG["batch"], 1), generator=g)
    ids = (start + stride * torch.arange(CFG["ctx"] + 1)) % CFG["vocab"]
    return ids[rank * rows:(rank + 1) * rows]


def shard_file(folder, step, rank, world):
    return os.path.join(folder, f"s{step:05d}-{rank}of{world}.pt")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = LM(CFG["vocab"], CFG["dim"], CFG["layers"])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = BackwardOptimizer(model, CFG["lr"])

    start = 0
    if CFG["resume"] and os.path.exists(os.path.join(CFG["resume"], "latest.json")):
        with open(os.path.join(CFG["resume"], "latest.json")) as f:
            start = json.load(f)["step"]
        blob = torch.load(shard_file(CFG["resume"], start, rank, world))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.to_local().copy_(blob["weights"][name])
        opt.load(blob["optim"])

    for step in range(start, CFG["steps"]):
        opt.set_lr(0.5 * (1 + math.cos(math.pi * step / CFG["steps"])))
        ids = stream(step, rank, world)
        loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        loss.backward()
        done = step + 1
        if done % 4 == 0 or step == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"{done:4d} | loss {mean.item():.4f}", flush=True)
        if CFG["out"] and CFG["save_every"] and done % CFG["save_every"] == 0:
            os.makedirs(CFG["out"], exist_ok=True)
            weights = {n: p.detach().to_local() for n, p in model.named_parameters()}
            torch.save({"weights": weights, "optim": opt.state()}, shard_file(CFG["out"], done, rank, world))
            dist.barrier()
            if rank == 0:
                with open(os.path.join(CFG["out"], "latest.json"), "w") as f:
                    json.dump({"step": done, "world": world}, f)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
