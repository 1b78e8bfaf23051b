"""MoE language model with the auxiliary balance loss over the *global* batch and gradient accumulation.

The balance loss is E * sum_e f_e * P_e with f_e the share of the tokens that went to expert e and P_e the mean
router probability. f is taken over all ranks and all micro batches of the step (first pass, without gradients);
P enters linearly, so local means are averaged correctly by FSDP."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ = 32, 16


class MoE(nn.Module):
    def __init__(self, dim, n):
        super().__init__()
        self.n = n
        self.router = nn.Linear(dim, n, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(n))
        self.mean_prob = None
        self.z = None
        self.routed = None

    def forward(self, x):
        logits = self.router(x.flatten(0, 1))
        prob = logits.softmax(-1)
        w, idx = prob.max(-1)
        self.routed = F.one_hot(idx, self.n).sum(0)
        self.mean_prob, self.z = prob.mean(0), logits.logsumexp(-1).square().mean()
        flat = x.flatten(0, 1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):   # also with zero tokens: the expert stays in the graph
            rows = (idx == e).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(flat[rows]) * w[rows, None])
        return out.view_as(x)


class LM(nn.Module):
    def __init__(self, dim=16, depth=2, n=4):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, dim), nn.Parameter(0.1 * torch.randn(SEQ, dim))
        self.rnns = nn.ModuleList(nn.GRU(dim, dim, batch_first=True) for _ in range(depth))
        self.moes = nn.ModuleList(MoE(dim, n) for _ in range(depth))
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos
        for rnn, moe in zip(self.rnns, self.moes):
            x = x + rnn(x)[0]
            x = x + moe(x)
        return self.out(x)


def rows_of(step, n):
    g = torch.Generator().manual_seed(step)
    start, stride = torch.randint(VOCAB, (n, 1), generator=g), torch.randint(1, 4, (n, 1), generator=g)
    return (start + stride * torch.arange(SEQ + 1)) % VOCAB


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--micro", type=int, default=2)
    ap.add_argument("--aux", type=float, default=0.05)
    ap.add_argument("--z", type=float, default=1e-3)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(9)
    model = LM()
    for moe in model.moes:
        fully_shard(moe, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)

    for step in range(a.steps):
        micro = rows_of(step, a.batch).chunk(world)[rank].chunk(a.micro)
        # pass 1: where do the tokens go?
        share = [torch.zeros(m.n) for m in model.moes]
        with torch.no_grad():
            for rows in micro:
                model(rows[:, :-1])
                for s, m in zip(share, model.moes):
                    s += m.routed
        for s in share:
            dist.all_reduce(s)
            s /= a.batch * SEQ
        # pass 2: gradients
        seen = 0.0
        for i, rows in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            lm = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            aux = sum(m.n * (s * m.mean_prob).sum() for s, m in zip(share, model.moes))
            z = sum(m.z for m in model.moes)
            ((lm + a.aux * aux + a.z * z) / len(micro)).backward()
            seen += lm.detach() / len(micro)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(seen)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {seen.item() / world:.4f} largest share {max(s.max().item() for s in share):.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
