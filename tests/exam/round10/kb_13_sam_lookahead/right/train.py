import argparse
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from convnet import ConvNeXt
from sam import SAM

CLASSES, DEPTH = 6, 3


def make_split(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    proto = F.interpolate(torch.randn(CLASSES, 3, 3, 3, generator=torch.Generator().manual_seed(0)), size=(12, 12), mode="bilinear")
    return proto[y] + 0.8 * torch.randn(n, 3, 12, 12, generator=g), y


def stream(x, y, batch, seed, start, stop):
    """Global batches with MixUp, label smoothing targets and the numbers for stochastic depth."""
    for step in range(start, stop):
        g = torch.Generator().manual_seed(seed * 1_000_000 + step)
        idx = torch.randint(len(x), (batch,), generator=g)
        other = idx[torch.randperm(batch, generator=g)]
        lam = 0.5 + 0.5 * torch.rand(batch, generator=g)
        target = lam[:, None] * F.one_hot(y[idx], CLASSES) + (1 - lam)[:, None] * F.one_hot(y[other], CLASSES)
        image = lam[:, None, None, None] * x[idx] + (1 - lam)[:, None, None, None] * x[other]
        yield step, image, 0.9 * target + 0.1 / CLASSES, torch.rand(batch, DEPTH, generator=g)


class ShardFiles:
    """One pickle per rank with the local shards; a marker file says that a checkpoint is complete."""

    def __init__(self, root):
        self.root = Path(root) if root else None

    def write(self, step, payload):
        folder = self.root / str(step)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{dist.get_rank()}.pkl", "wb") as f:
            pickle.dump({k: [t.numpy() for t in v] if isinstance(v, list) else v for k, v in payload.items()}, f)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "DONE").write_text(str(dist.get_world_size()))
        dist.barrier()

    def read_newest(self):
        step = max(int(p.parent.name) for p in self.root.glob("*/DONE"))
        folder = self.root / str(step)
        if int((folder / "DONE").read_text()) != dist.get_world_size():
            raise RuntimeError("this checkpoint was written by another number of ranks")
        with open(folder / f"{dist.get_rank()}.pkl", "rb") as f:
            payload = pickle.load(f)
        return step, {k: [torch.from_numpy(a) for a in v] if isinstance(v, list) else v for k, v in payload.items()}


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    hits = (model(x.chunk(world)[rank], torch.ones(len(x) // world, DEPTH)).argmax(1) == y.chunk(world)[rank]).sum()
    dist.all_reduce(hits)
    model.train()
    return hits.item() / len(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--save-to", default=None)
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(42)
    model = ConvNeXt(CLASSES, depth=DEPTH)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sam = SAM(model, base)
    momenta = [torch.zeros_like(p) for p in sam.params]
    for p, m in zip(sam.params, momenta):
        base.state[p]["momentum_buffer"] = m

    start = 0
    if args.resume:
        start, s = ShardFiles(args.resume).read_newest()
        with torch.no_grad():
            for p, m, slow, a, b, c in zip(sam.params, momenta, sam.slow, s["weights"], s["momenta"], s["slow"]):
                SAM._local(p).copy_(a)
                SAM._local(m).copy_(b)
                slow.copy_(c)
        sam.steps = s["sam_steps"]

    x, y = make_split(240, seed=1)
    test = make_split(48, seed=2)
    files = ShardFiles(args.save_to)
    for step, image, target, u in stream(x, y, args.batch, 9, start, args.steps):
        image, target, u = (t.chunk(world)[rank] for t in (image, target, u))
        for group in base.param_groups:
            group["lr"] = 0.05 * min(1.0, (step + 1) / 4)

        loss = F.cross_entropy(model(image, u), target)
        loss.backward()
        sam.climb()
        sharp = F.cross_entropy(model(image, u), target)
        sharp.backward()
        sam.descend()

        both = torch.stack([loss.detach(), sharp.detach()])
        dist.all_reduce(both)
        done = step + 1
        if done % 4 == 0:
            acc = accuracy(model, *test)
            if rank == 0:
                print(f"step {done} loss {both[0] / world:.4f} sharp {both[1] / world:.4f} test acc {acc:.3f}")
        if args.save_every and done % args.save_every == 0:
            files.write(done, {"weights": [SAM._local(p) for p in sam.params], "momenta": [SAM._local(m) for m in momenta],
                               "slow": sam.slow, "sam_steps": sam.steps})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
