"""HSDP with accumulation: inside a window gradients are only reduce-scattered; the replicas meet on the last micro-batch."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Gated(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n = nn.LayerNorm(dim)
        self.a, self.b, self.o = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        y = self.n(x)
        return x + self.o(F.silu(self.a(y)) * self.b(y))


class Tagger(nn.Module):
    def __init__(self, vocab=30, dim=20, tags=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Gated(dim) for _ in range(2))
        self.head = nn.Linear(2 * dim, tags)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        left = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.head(torch.cat([x, left], -1))


def window(step, n_micro, micro, length=8, vocab=30):
    """All micro-batches of an optimizer step; label -100 on padding."""
    g = torch.Generator().manual_seed(4000 + step)
    ids = torch.randint(vocab, (n_micro, micro, length), generator=g)
    prev = F.pad(ids, (1, 0))[..., :-1]
    tags = (ids + 2 * prev) // 18
    keep = torch.arange(length) < torch.randint(3, length + 1, (n_micro, micro, 1), generator=g)
    return ids, torch.where(keep, tags.clamp(max=4), -100)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--micro", type=int, default=16, help="rows of a global micro-batch")
    ap.add_argument("--accum", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (min(2, world), world // min(2, world)), mesh_dim_names=("rep", "sh"))
    torch.manual_seed(1)
    model = Tagger()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for b in (*model.blocks, model):
        b.set_gradient_divide_factor(1.0)  # plain sums: each loss below is already a share of the global mean
    opt = torch.optim.AdamW(model.parameters(), lr=1.2e-2, eps=1e-6)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, opt)
        st = {"m": m, "o": o, "step": 0}
        dcp.load(st, checkpoint_id=os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
        set_state_dict(model, opt, model_state_dict=st["m"], optim_state_dict=st["o"])
        step = st["step"]

    while step < (args.stop_at or args.steps):
        ids, tags = window(step, args.accum, args.micro)
        total = (tags != -100).sum()
        value = torch.zeros(())
        for k in range(args.accum):
            model.set_requires_all_reduce(k == args.accum - 1)
            i, t = ids[k].chunk(world)[rank], tags[k].chunk(world)[rank]
            loss = F.cross_entropy(model(i).flatten(0, 1), t.flatten(), ignore_index=-100, reduction="sum") / total
            loss.backward()
            value += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(value)
        if rank == 0:
            print(f"step {step} loss/token {value.item():.4f} tokens {int(total)}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o, "step": step}, checkpoint_id=f"{args.out}/{step:06d}")

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
