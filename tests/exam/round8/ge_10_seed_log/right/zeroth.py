"""Training by forward passes only: directional differences along random directions that are known by their seed."""
import json
from pathlib import Path

import torch
import torch.distributed as dist


def own_rows(full, like):
    """The rows of a full tensor that this rank holds of the sharded parameter `like`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pieces = full.chunk(world)
    return pieces[rank] if rank < len(pieces) else full[:0]


class ForwardOnlyTrainer:
    def __init__(self, model, lr, eps=1e-2, directions=4, seed=0):
        self.model = model
        self.params = list(model.parameters())
        self.lr, self.eps, self.directions, self.seed = lr, eps, directions, seed
        self.log = []  # one list of (seed, coefficient) per step

    def direction(self, seed):
        g = torch.Generator().manual_seed(seed)
        return [own_rows(torch.randn(p.shape, generator=g), p) for p in self.params]

    def shift(self, base, direction, amount):
        for p, b, d in zip(self.params, base, direction):
            p.to_local().copy_(b + amount * d)

    def apply(self, entry):
        """One update; it depends on nothing but the weights and the log's entry."""
        for seed, coefficient in entry:
            for p, d in zip(self.params, self.direction(seed)):
                p.to_local().sub_(self.lr * coefficient / len(entry) * d)

    @torch.no_grad()
    def step(self, loss_fn):
        base = [p.to_local().clone() for p in self.params]
        entry, seen = [], []
        for k in range(self.directions):
            seed = self.seed + len(self.log) * self.directions + k
            direction = self.direction(seed)
            values = []
            for sign in (1, -1):
                self.shift(base, direction, sign * self.eps)
                loss = loss_fn().double() / dist.get_world_size()
                dist.all_reduce(loss)
                values.append(loss.item())
            entry.append((seed, (values[0] - values[1]) / (2 * self.eps)))
            seen += values
        for p, b in zip(self.params, base):
            p.to_local().copy_(b)
        self.apply(entry)
        self.log.append(entry)
        return sum(seen) / len(seen)

    def save(self, folder):
        folder = Path(folder)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"log_{len(self.log)}.json").write_text(json.dumps(self.log))
        dist.barrier()

    @torch.no_grad()
    def replay_newest(self, folder):
        newest = max(Path(folder).glob("log_*.json"), key=lambda p: int(p.stem.split("_")[1]))
        for entry in json.loads(newest.read_text()):
            self.apply(entry)
            self.log.append(entry)
