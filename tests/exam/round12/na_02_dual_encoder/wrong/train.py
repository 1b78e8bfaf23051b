"""Dual encoder for retrieval (question -> passage), in-batch negatives from all ranks."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, DIM = 64, 12, 32


class GatherRows(torch.autograd.Function):
    """Rows of all ranks, in rank order."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        lo = dist.get_rank() * ctx.rows
        return grad[lo:lo + ctx.rows]


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(SEQ, SEQ)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ff(self.norm(x))


class Encoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(DIM) for _ in range(layers))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, ids):
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h)
        return F.normalize(self.out(h.mean(1)), dim=-1)


class Retriever(nn.Module):
    def __init__(self):
        super().__init__()
        self.question, self.passage = Encoder(), Encoder()
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, q, p):
        return self.question(q), self.passage(p), self.log_scale.exp()


def pairs(step, n):
    """A passage is a bag of topic words; its question holds a few of them, mapped to the question words."""
    g = torch.Generator().manual_seed(7_000 + step)
    topic = torch.randint(16, (n, 1), generator=g)
    p = topic * 4 + torch.randint(4, (n, SEQ), generator=g)
    q = torch.where(torch.rand(n, SEQ, generator=g) < 0.7, (p * 5 + 3) % VOCAB, torch.randint(VOCAB, (n, SEQ), generator=g))
    return q, p


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", type=pathlib.Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = Retriever()
    for tower in (model.question, model.passage):
        for layer in tower.layers:
            fully_shard(layer)
        fully_shard(tower)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    def bundle(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": torch.tensor(step)}

    first = 0
    if args.resume:
        last = max(args.resume.glob("it*"), default=None, key=lambda d: d.name)
        if last is not None:
            state = bundle(0)
            dcp.load(state, checkpoint_id=str(last))
            set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
            first = int(state["step"])

    mine = args.batch // world
    for step in range(first, args.steps):
        q_ids, p_ids = pairs(step, args.batch)
        sel = slice(rank * mine, (rank + 1) * mine)
        q, p, scale = model(q_ids[sel], p_ids[sel])
        # every question against the passages of the whole batch
        scores = scale * q @ GatherRows.apply(p).T
        gold = torch.arange(mine) + rank * mine
        loss = F.cross_entropy(scores, gold)
        loss.backward()
        opt.step()
        opt.zero_grad()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step + 1) % 4 == 0 or rank == 0 and step == 0:
            print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(bundle(step + 1), checkpoint_id=str(args.out / f"it{step + 1:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
