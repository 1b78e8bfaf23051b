"""Fine-tuning without backward passes (MeZO, Malladi et al. 2023) on a sharded classifier.

The direction of a step is not stored: it is drawn from a seed, parameter by parameter, as a full tensor of
which each rank uses the rows of its shard. Two forward passes give the projected gradient.
"""
import argparse
import json
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


@dataclass
class State:
    step: int = 0
    seen: int = 0
    lr_scale: float = 1.0
    average_loss: float = 0.0


class TextClassifier(nn.Module):
    def __init__(self, vocab=60, dim=24, classes=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm = nn.LayerNorm(dim)
        self.cls = nn.Linear(dim, classes)

    def forward(self, ids):
        h = self.emb(ids).mean(1)
        return self.cls(self.norm(h + self.mix(h)))


def documents(step, n, vocab=60, classes=3, length=12):
    g = torch.Generator().manual_seed(3000 + step)
    y = torch.randint(classes, (n,), generator=g)
    topic = torch.randint(vocab // classes, (n, length), generator=g) + (y * (vocab // classes))[:, None]
    noise = torch.randint(vocab, (n, length), generator=g)
    keep = torch.rand(n, length, generator=g) < 0.6
    return torch.where(keep, topic, noise), y


class MeZO:
    def __init__(self, model, lr, eps, directions):
        self.params = list(model.parameters())
        self.model, self.lr, self.eps, self.directions = model, lr, eps, directions

    @torch.no_grad()
    def move(self, seed, amount):
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            z = torch.randn(p.shape, generator=g)
            if isinstance(p, nn.Parameter) and hasattr(p, "device_mesh"):
                z = distribute_tensor(z, p.device_mesh, p.placements, src_data_rank=None)
            p.add_(z, alpha=amount)

    @torch.no_grad()
    def loss(self, ids, y, total):
        value = F.cross_entropy(self.model(ids), y, reduction="sum").double()
        dist.all_reduce(value)
        return value.item() / total

    def step(self, step, ids, y, total, lr_scale):
        weights = [p.detach().to_local().clone() for p in self.params]
        projected, losses = [], []
        for k in range(self.directions):
            seed = 1_000_003 * step + k
            self.move(seed, self.eps)
            plus = self.loss(ids, y, total)
            self.move(seed, -2 * self.eps)
            minus = self.loss(ids, y, total)
            # back to exactly the weights before, no rounding is left behind
            with torch.no_grad():
                for p, w in zip(self.params, weights):
                    p.to_local().copy_(w)
            projected.append((seed, (plus - minus) / (2 * self.eps)))
            losses.append((plus + minus) / 2)
        for seed, slope in projected:
            self.move(seed, -self.lr * lr_scale * slope / self.directions)
        return sum(losses) / len(losses)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--directions", type=int, default=4)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--eps", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mezo")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = TextClassifier()
    # no backward pass will reshard the root, and its weights change between the forward passes
    fully_shard(model.mix, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    mezo = MeZO(model, args.lr, args.eps, args.directions)
    st = State()

    if args.resume:
        names = [n for n in os.listdir(args.resume) if n.endswith(".json")]
        stem = sorted(names)[-1][: -len(".json")]
        with open(os.path.join(args.resume, stem + ".json")) as f:
            st = State(**json.load(f))
        full = torch.load(os.path.join(args.resume, stem + ".pt"))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(distribute_tensor(full[name], p.device_mesh, p.placements))

    while st.step < args.steps:
        ids, y = (t.chunk(world)[rank] for t in documents(st.step, args.batch))
        loss = mezo.step(st.step, ids, y, args.batch, st.lr_scale)
        st.step += 1
        st.seen += args.batch
        st.average_loss = loss if st.step == 1 else 0.8 * st.average_loss + 0.2 * loss
        if loss > 1.5 * st.average_loss:
            st.lr_scale *= 0.5
        if rank == 0 and st.step % 4 == 0:
            print(f"step {st.step} loss {loss:.6f} average {st.average_loss:.6f} lr x{st.lr_scale}", flush=True)
        if args.save_every and st.step % args.save_every == 0:
            full = {n: p.full_tensor() for n, p in model.named_parameters()}
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                stem = os.path.join(args.out, f"step{st.step:06d}")
                torch.save(full, stem + ".pt")
                with open(stem + ".json", "w") as f:
                    json.dump(asdict(st), f)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
