"""Memory-light chat tuning without backward (simultaneous perturbation, as in MeZO).

A step is a handful of seeds and scalars, so the checkpoint is the list of them: a resumed run replays the updates."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

VOCAB, CTX, DIM = 16, 8, 16


class Mixer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(2 * d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        prev = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.b(torch.relu(self.a(torch.cat([x, prev], -1))))


class ChatModel(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Mixer(DIM) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SPSA:
    def __init__(self, model, lr, eps, probes):
        self.model, self.lr, self.eps, self.probes = model, lr, eps, probes
        self.params = list(model.parameters())
        self.history = []

    def noise(self, seed):
        """The shards of one direction, the same direction whatever the number of ranks."""
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            z = torch.randn(p.shape, generator=g)
            yield distribute_tensor(z, p.device_mesh, p.placements, src_data_rank=None).to_local()

    def shift(self, seed, amount):
        for p, z in zip(self.params, self.noise(seed)):
            p.to_local().add_(z, alpha=amount)

    def step(self, closure, number):
        home = [p.to_local().clone() for p in self.params]
        record = []
        for k in range(self.probes):
            seed = number * 1_000 + k
            sides = []
            for sign in (1.0, -1.0):
                self.shift(seed, sign * self.eps)
                sides.append(closure())
                for p, w in zip(self.params, home):
                    p.to_local().copy_(w)
            record.append((seed, (sides[0] - sides[1]) / (2 * self.eps)))
        self.apply(record)
        return sum(sides) / 2

    def apply(self, record):
        for seed, slope in record:
            self.shift(seed, -self.lr * slope / self.probes)
        self.history.append(record)


def conversation(step, n, rank, world):
    g = torch.Generator().manual_seed(step)
    first = torch.randint(VOCAB, (n, 1), generator=g)
    ids = (first + 3 * torch.arange(CTX + 1)) % VOCAB
    return ids.chunk(world)[rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--probes", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-2)
    ap.add_argument("--eps", type=float, default=1e-2)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = ChatModel()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    torch.set_grad_enabled(False)
    opt = SPSA(model, args.lr, args.eps, args.probes)

    if args.resume:
        path = os.path.join(args.resume, "replay.json")
        if os.path.exists(path):
            with open(path) as f:
                for record in json.load(f):
                    opt.apply([(int(s), float.fromhex(x)) for s, x in record])

    for step in range(len(opt.history), args.steps):
        ids = conversation(step, args.batch, rank, world)

        def closure():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / world
            dist.all_reduce(loss)
            return loss.item()

        loss = opt.step(closure, step)
        if rank == 0 and (step % 4 == 3 or step == 0):
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0 and rank == 0:
            os.makedirs(args.out, exist_ok=True)
            tmp = os.path.join(args.out, "replay.tmp")
            with open(tmp, "w") as f:
                json.dump([[(s, x.hex()) for s, x in record] for record in opt.history], f)
            os.replace(tmp, os.path.join(args.out, "replay.json"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
