"""Pre-trains a masked-token MLP-mixer. The model is built on the meta device and only the shards are materialised."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

VOCAB, MASK, T = 23, 23, 12


class MixerBlock(nn.Module):
    def __init__(self, d, t, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.tok_in, self.tok_out = nn.Linear(t, h), nn.Linear(h, t)
        self.ch_in, self.ch_out = nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        y = self.n1(x).transpose(1, 2)
        x = x + self.tok_out(torch.relu(self.tok_in(y))).transpose(1, 2)
        return x + self.ch_out(torch.relu(self.ch_in(self.n2(x))))


class Mixer(nn.Module):
    def __init__(self, d=16, depth=2, h=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB + 1, d)
        self.blocks = nn.ModuleList(MixerBlock(d, T, h) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def fill(name, w, shape, depth):
    if name.endswith("bias"):
        nn.init.zeros_(w)
    elif len(shape) == 1:
        nn.init.ones_(w)
    elif name.startswith("emb"):
        nn.init.normal_(w, std=0.5)
    else:
        std = 1.0 / math.sqrt(shape[1])
        if name.endswith("out.weight"):
            std /= math.sqrt(2 * depth)
        nn.init.trunc_normal_(w, std=std, a=-3 * std, b=3 * std)


@torch.no_grad()
def init_weights(model, seed):
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            w = torch.empty(p.shape)
            fill(name, w, p.shape, len(model.blocks))
            p.copy_(distribute_tensor(w, p.device_mesh, p.placements))
        else:
            fill(name, p, p.shape, len(model.blocks))


def make_batch(step, n):
    g = torch.Generator().manual_seed(9000 + step)
    a = torch.randint(0, VOCAB, (n, 1), generator=g)
    d = torch.randint(1, 3, (n, 1), generator=g)
    ids = (a + d * torch.arange(T)) % VOCAB
    hide = torch.zeros(n, T, dtype=torch.bool)
    hide.scatter_(1, torch.rand(n, T, generator=g).topk(3, dim=1).indices, True)
    return ids.masked_fill(hide, MASK), ids, hide


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=42)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = Mixer()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model, a.seed)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.02, eps=1e-5)
    start = 0
    if a.resume:
        last = sorted(d for d in os.listdir(a.resume) if d.startswith("step"))[-1]
        m, o = get_state_dict(model, opt)
        sd = {"model": m, "opt": o}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, last))
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        start = int(last[4:])
    for step in range(start, a.steps):
        x, y, hide = (v.chunk(world)[rank] for v in make_batch(step, a.batch))
        loss = nn.functional.cross_entropy(model(x)[hide], y[hide])
        loss.backward()
        opt.step()
        opt.zero_grad()
        s = loss.detach().clone()
        dist.all_reduce(s)
        if rank == 0:
            print(f"step {step + 1} loss {s.item() / world:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o}, checkpoint_id=os.path.join(a.out, f"step{step + 1:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
