"""Every parameter has its own optimizer, which steps inside backward as soon as its gradient shard is there."""

import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Stage(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin, self.norm = nn.Linear(d, d), nn.LayerNorm(d)

    def forward(self, x):
        return x + F.relu(self.lin(self.norm(x)))


class Ranker(nn.Module):
    def __init__(self, items=80, d=32):
        super().__init__()
        self.items = nn.Embedding(items, d)
        self.stages = nn.Sequential(*[Stage(d) for _ in range(3)])
        self.score = nn.Linear(d, 1)

    def forward(self, ids):
        return self.score(self.stages(self.items(ids))).squeeze(-1)


class BackwardOptimizers:
    def __init__(self, model, factory):
        self.named = {n: (p, factory(p)) for n, p in model.named_parameters()}
        self.steps_taken = 0
        for p, opt in self.named.values():
            p.register_post_accumulate_grad_hook(lambda q, opt=opt: self._apply(opt))

    def _apply(self, opt):
        opt.step()
        opt.zero_grad(set_to_none=True)
        self.steps_taken += 1

    def tensors(self):
        """All state as one flat dictionary of (sharded) tensors; missing state is created."""
        out = {}
        for n, (p, opt) in self.named.items():
            st = opt.state[p]
            if not st:
                st["step"] = torch.zeros(())
                st["sum"] = torch.full_like(p, 0.1, requires_grad=False)
            out |= {f"{n}|{k}": v for k, v in st.items()}
        return out


def pairs(step, n, rank, world):
    """Bradley-Terry comparisons between items whose hidden quality is known."""
    quality = torch.randn(80, generator=torch.Generator().manual_seed(1)) * 2
    g = torch.Generator().manual_seed(300 + step)
    ij = torch.randint(80, (n, 2), generator=g)
    won = torch.rand(n, generator=g) < torch.sigmoid(quality[ij[:, 0]] - quality[ij[:, 1]])
    return ij[rank::world], won.float()[rank::world]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(8)
    model = Ranker()
    for stage in model.stages:
        fully_shard(stage)
    fully_shard(model)
    opts = BackwardOptimizers(
        model, lambda p: torch.optim.Adagrad([p], lr=0.05, initial_accumulator_value=0.1, foreach=False)
    )

    def live():
        weights = {n: p.detach() for n, p in model.named_parameters()}
        return {"weights": weights, "state": opts.tensors()}

    first = 0
    if args.resume:
        ck = max(args.resume.iterdir(), key=lambda p: int(p.name))
        dcp.load(live(), checkpoint_id=ck)
        first = int(ck.name)

    for step in range(first, args.steps):
        ij, won = pairs(step, 128, rank, world)
        s = model(ij)
        loss = F.binary_cross_entropy_with_logits(s[:, 0] - s[:, 1], won)
        loss.backward()
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(live(), checkpoint_id=args.out / str(step + 1))
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"{step + 1:3d} loss {shown.item():.4f}", flush=True)

    assert opts.steps_taken == (args.steps - first) * len(opts.named)
    full = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
