"""Language model trained by two optimizers: Muon for the hidden matrices, AdamW for embeddings, head and vectors."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from muon import Muon

VOCAB, LENGTH, BATCH, DIM = 30, 12, 32, 26
LRS = (0.03, 1e-2)


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.relu(self.up(self.norm(x))).square())


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(LENGTH, DIM)
        self.layer = Mixer(DIM)
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.head(self.norm(self.layer(self.embed(ids) + self.pos.weight)))


def batch(step, rank, world):
    g = torch.Generator().manual_seed(40 + step)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    stride = torch.randint(1, 4, (BATCH, 1), generator=g)
    seq = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    seq = seq.tensor_split(world)[rank]
    return seq[:, :-1], seq[:, 1:]


def app_state(model, opts, step):
    model_sd, optim_sd = get_state_dict(model, opts)
    return {"model": model_sd, "optim": optim_sd, "step": step}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = LM()
    fully_shard(model.layer)
    fully_shard(model)

    matrices = [p for p in model.layer.parameters() if p.ndim == 2]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    opts = [Muon(matrices, lr=LRS[0]), torch.optim.AdamW(others, lr=LRS[1], betas=(0.8, 0.95))]

    start = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=int)
        state = app_state(model, opts, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opts, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step in range(start, args.steps):
        for opt, lr in zip(opts, LRS):
            for group in opt.param_groups:
                group["lr"] = lr * (1.0 - 0.9 * step / args.steps)
        x, y = batch(step, rank, world)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 3 == 0:
            print(f"{step + 1} {mean.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            dcp.save(app_state(model, opts, step + 1), checkpoint_id=os.path.join(args.out, str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
