import argparse
import os
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from muon import Muon


@dataclass
class OptimConfig:
    matrix_lr: float = 0.02
    other_lr: float = 4e-3
    warmup: int = 4
    clip: float = 1.0


@dataclass
class Config:
    vocab: int = 32
    dim: int = 32
    depth: int = 3
    context: int = 8
    batch: int = 64
    steps: int = 16
    seed: int = 3
    optim: OptimConfig = field(default_factory=OptimConfig)


class MixerBlock(nn.Module):
    def __init__(self, context, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Linear(context, context, bias=False)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class NextToken(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        nn.init.normal_(self.embed.weight, std=cfg.dim ** -0.5)
        self.blocks = nn.ModuleList(MixerBlock(cfg.context, cfg.dim) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.dim)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        # tied to the embedding
        return self.norm(x[:, -1]) @ self.embed.weight.T


def data_stream(cfg, step):
    g = torch.Generator().manual_seed(cfg.seed + 100 * step)
    a = torch.randint(1, 6, (cfg.batch, 1), generator=g)
    b = torch.randint(cfg.vocab, (cfg.batch, 1), generator=g)
    seq = (a * torch.arange(cfg.context + 1) + b) % cfg.vocab
    return seq[:, :-1], seq[:, -1]


class OptimizerGroup:
    """Matrices of the blocks go to Muon, everything else to AdamW; one warmup for both."""

    def __init__(self, model, cfg):
        matrices = [p for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
        others = [p for n, p in model.named_parameters() if not ("blocks" in n and p.ndim == 2)]
        self.params = list(model.parameters())
        self.clip = cfg.clip
        self.optimizers = [Muon(matrices, lr=cfg.matrix_lr), torch.optim.AdamW(others, lr=cfg.other_lr, weight_decay=0.0)]
        ramp = lambda s: min(1.0, (s + 1) / cfg.warmup)
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(o, ramp) for o in self.optimizers]

    def step(self):
        torch.nn.utils.clip_grad_norm_(self.params, self.clip)
        for part in (*self.optimizers, *self.schedulers):
            part.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        return [part.state_dict() for part in (*self.optimizers, *self.schedulers)]

    def load_state_dict(self, states):
        for part, state in zip((*self.optimizers, *self.schedulers), states, strict=True):
            part.load_state_dict(state)


class RankFiles:
    """latest.txt is written last and names the newest complete checkpoint."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, step, **objects):
        name = f"step-{step}"
        os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        state = {key: value.state_dict() for key, value in objects.items()}
        torch.save({"step": step, **state}, os.path.join(self.folder, name, f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"))
        dist.barrier()
        if dist.get_rank() == 0:
            with open(os.path.join(self.folder, "latest.txt"), "w") as f:
                f.write(name)
        dist.barrier()

    def load(self, **objects):
        with open(os.path.join(self.folder, "latest.txt")) as f:
            name = f.read().strip()
        path = os.path.join(self.folder, name, f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt")
        state = torch.load(path, weights_only=False)
        for key, value in objects.items():
            value.load_state_dict(state[key])
        return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = Config()
    if rank == 0:
        print(asdict(cfg), flush=True)
    torch.manual_seed(cfg.seed)
    model = NextToken(cfg)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = OptimizerGroup(model, cfg.optim)
    start = RankFiles(args.resume).load(model=model, optim=optim) if args.resume else 0
    for step in range(start, cfg.steps):
        ids, target = (t[rank::world] for t in data_stream(cfg, step))
        loss = F.cross_entropy(model(ids), target)
        loss.backward()
        optim.step()
        optim.zero_grad()
        if (step + 1) % 4 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item() / world:.6f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            RankFiles(args.out).save(step + 1, model=model, optim=optim)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
