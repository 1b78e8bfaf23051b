"""Curriculum: three phases with growing sequence length and shrinking batch, each with an optimizer and a one-cycle
schedule of its own. A phase begins with fresh optimizer state; two blocks join the training only in phase 2."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB = 26
PHASES = [dict(steps=10, length=8, batch=32, lr=8e-3, depth=2),
          dict(steps=10, length=16, batch=16, lr=6e-3, depth=4),
          dict(steps=10, length=32, batch=8, lr=3e-3, depth=4)]


def slopes(length):
    d = torch.arange(length)[:, None] - torch.arange(length)[None]
    bias = -0.3 * d.clamp(min=0).float()
    return bias.masked_fill(d < 0, float("-inf"))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.ff = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(3 * dim, dim)
        self.gain = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.qkv(y).chunk(3, -1)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=slopes(x.shape[1]))
        return x + self.gain * self.out(torch.cat([a, F.gelu(self.ff(y))], -1))


class GrowingLM(nn.Module):
    def __init__(self, dim=20, depth=4):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, VOCAB)
        self.active = depth

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks[: self.active]:
            x = block(x)
        return self.out(x)


def rows(step, n, length):
    g = torch.Generator().manual_seed(2000 + step)
    start, stride = torch.randint(VOCAB, (n, 1), generator=g), torch.randint(1, 4, (n, 1), generator=g)
    return (start + stride * torch.arange(length + 1)) % VOCAB


def start_phase(model, phase):
    """Sets depth, optimizer and schedule of a phase. The order of the parameters never changes."""
    model.active = phase["depth"]
    used = [p for n, p in model.named_parameters() if not n.startswith("blocks.") or int(n.split(".")[1]) < model.active]
    opt = torch.optim.AdamW(used, lr=phase["lr"], betas=(0.85, 0.95))
    return opt, torch.optim.lr_scheduler.OneCycleLR(opt, phase["lr"], total_steps=phase["steps"] + 1, pct_start=0.3)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(40)
    model = GrowingLM()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)

    where = {"phase": 0, "inner": 0, "total": 0, "sched": None}
    path = None
    if a.resume:
        path = os.path.join(a.resume, max(os.listdir(a.resume)))
        where = json.load(open(os.path.join(path, "where.json")))

    for k in range(where["phase"], len(PHASES)):
        phase = PHASES[k]
        opt, sched = start_phase(model, phase)
        if path is not None:
            sd = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
            dcp.load(sd, checkpoint_id=path)
            set_model_state_dict(model, sd["model"])
            set_optimizer_state_dict(model, opt, sd["opt"])
            sched.load_state_dict(where["sched"])
            path = None
        for inner in range(where["inner"], phase["steps"]):
            part = rows(where["total"], phase["batch"], phase["length"]).chunk(world)[rank]
            loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            sched.step()
            where["total"] += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0 and where["total"] % 5 == 0:
                print(f"phase {k} step {where['total']} length {phase['length']} loss {mean.item() / world:.4f}", flush=True)
            if a.out and a.save_every and where["total"] % a.save_every == 0:
                to = os.path.join(a.out, f"total{where['total']:04d}")
                dcp.save({"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}, checkpoint_id=to)
                if rank == 0:
                    json.dump({"phase": k, "inner": inner + 1, "total": where["total"], "sched": sched.state_dict()},
                              open(os.path.join(to, "where.json"), "w"))
                dist.barrier()
        where["inner"] = 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
