"""Two phases: ordinary pretraining of a text classifier, then tuning on another domain without any backward pass
(simultaneous perturbation as in MeZO: two forward passes on both sides of the weights, along random directions)."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class Bag(nn.Module):
    def __init__(self, vocab=60, d=24, classes=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Tanh(), nn.Linear(2 * d, d)) for _ in range(2))
        self.head = nn.Linear(d, classes)

    def forward(self, ids):
        x = self.emb(ids).mean(1)
        for f in self.body:
            x = x + f(x)
        return self.head(x)


def reviews(n, seed, shifted):
    """Words 0-19 speak for class 0 and so on; in the shifted domain the classes are named in another order."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    own = torch.randint(0, 20, (n, 16), generator=g) + 20 * y[:, None]
    noise = torch.randint(0, 60, (n, 16), generator=g)
    ids = torch.where(torch.rand(n, 16, generator=g) < 0.4, own, noise)
    return ids, (y + 1) % 3 if shifted else y


class ZerothOrder:
    def __init__(self, params, lr, eps, directions, seed):
        self.params, self.lr, self.eps, self.directions, self.seed = list(params), lr, eps, directions, seed

    def direction(self, step, k):
        """The same direction at any number of ranks: every rank draws the whole and keeps its part."""
        gen = torch.Generator().manual_seed(self.seed + step * self.directions + k)
        for p in self.params:
            z = torch.randn(p.shape, generator=gen)
            yield p, distribute_tensor(z, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else z

    @torch.no_grad()
    def step(self, step, loss_fn):
        start = [p.detach().clone() for p in self.params]
        slopes, total = [], 0.0
        for k in range(self.directions):
            side = []
            for sign in (1, -1):
                for (p, z), p0 in zip(self.direction(step, k), start):
                    p.copy_(p0 + sign * self.eps * z)
                side.append(loss_fn())
            slopes.append((side[0] - side[1]) / (2 * self.eps))
            total += (side[0] + side[1]) / 2
        for p, p0 in zip(self.params, start):
            p.copy_(p0)
        for k, slope in enumerate(slopes):
            for p, z in self.direction(step, k):
                p.sub_(z * (self.lr * slope / self.directions))
        return total / self.directions


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pretrain", type=int, default=16)
    ap.add_argument("--tune", type=int, default=24)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = Bag()
    for f in model.body:
        fully_shard(f)
    # without a backward pass nothing else would free the gathered weights of the root
    fully_shard(model, reshard_after_forward=True)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    zo = ZerothOrder(model.parameters(), lr=0.01, eps=1e-2, directions=8, seed=5000)

    def shards(d):
        return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in d.items()}

    done = 0
    if args.resume:
        newest = sorted(Path(args.resume).iterdir())[-1]
        ck = torch.load(newest / f"rank{rank}.pt")
        with torch.no_grad():
            for name, p in shards(dict(model.named_parameters())).items():
                p.copy_(ck["weights"][name])
        done = ck["done"]
        if done < args.pretrain:
            for p, s in zip(model.parameters(), ck["adam"]):
                state = {"step": s["step"], "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                for k, v in shards(state).items():
                    v.copy_(s[k])
                adam.state[p] = state

    while done < args.pretrain + args.tune:
        tuning = done >= args.pretrain
        ids, y = reviews(args.batch, 100 + done, shifted=tuning)
        ids, y = ids.chunk(world)[rank], y.chunk(world)[rank]
        if not tuning:
            loss = F.cross_entropy(model(ids), y)
            adam.zero_grad()
            loss.backward()
            adam.step()
            value = loss.detach().clone()
            dist.all_reduce(value)
            value = value.item() / world
            if done + 1 == args.pretrain:
                adam.zero_grad()
                adam.state.clear()
        else:

            def global_loss():
                s = F.cross_entropy(model(ids), y).double()
                dist.all_reduce(s)
                return s.item() / world

            value = zo.step(done, global_loss)
        done += 1
        if rank == 0 and done % 4 == 0:
            print(f"{'tune' if tuning else 'pretrain'} {done} loss {value:.4f}", flush=True)
        if args.save_every and done % args.save_every == 0:
            folder = Path(args.out) / f"{done:06d}"
            os.makedirs(folder, exist_ok=True)
            state = {"weights": shards(dict(model.named_parameters())), "done": done}
            state["adam"] = [shards(adam.state[p]) for p in model.parameters()] if adam.state else []
            torch.save(state, folder / f"rank{rank}.pt")
            dist.barrier()

    if args.export:
        full = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
