import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sam import SAM


class MixerViT(nn.Module):
    """Patch embedding, stochastic depth given from outside, class token."""

    def __init__(self, d=24, depth=3, n_classes=4):
        super().__init__()
        self.embed = nn.Conv2d(3, d, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 5, d))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.0, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(d, n_classes)

    def forward(self, x, keep):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for i, block in enumerate(self.blocks):
            x = x + keep[:, i].view(-1, 1, 1) * (block(x) - x)
        return self.head(x[:, 0])


def global_batch(n, depth, gen, drop=0.1):
    y = torch.randint(0, 4, (n,), generator=gen)
    proto = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = proto[y] + torch.randn(n, 3, 8, 8, generator=gen)
    keep = (torch.rand(n, depth, generator=gen) > drop).float() / (1 - drop)
    return x, y, keep


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = MixerViT()
        for b in self.model.blocks:
            fully_shard(b)
        fully_shard(self.model)
        # eps well above rounding noise: key biases get no other gradient than that
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, eps=1e-5, weight_decay=0.02)
        self.sam = SAM(self.opt, cfg.rho, adaptive=True)
        self.gen = torch.Generator().manual_seed(cfg.seed + 1)
        self.step = 0

    def closure(self, x, y, keep):
        """Mean loss over the global batch, in micro-batches of equal size, gradients left in place."""
        n = self.cfg.micro
        total = torch.zeros(())
        parts = list(zip(x.chunk(n), y.chunk(n), keep.chunk(n)))
        for i, (xm, ym, km) in enumerate(parts):
            self.model.set_requires_gradient_sync(i == len(parts) - 1)
            loss = F.cross_entropy(self.model(xm, km), ym) / len(parts)
            loss.backward()
            total += loss.detach()
        return total

    def train_step(self):
        x, y, keep = global_batch(self.cfg.batch, len(self.model.blocks), self.gen)
        mine = [t.chunk(self.world)[self.rank] for t in (x, y, keep)]
        first = self.closure(*mine)
        self.sam.ascend()
        second = self.closure(*mine)  # same images and the same dropped blocks
        self.sam.descend()
        self.step += 1
        return torch.stack([first, second])

    def state(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "gen": self.gen.get_state(), "step": self.step}

    def resume(self, root):
        st = self.state()
        dcp.load(st, checkpoint_id=os.path.join(root, max(os.listdir(root))))
        set_state_dict(self.model, self.opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        self.gen.set_state(st["gen"])
        self.step = st["step"]

    def run(self):
        while self.step < self.cfg.steps:
            losses = self.train_step()
            if self.step % 5 == 0:
                dist.all_reduce(losses)
                if self.rank == 0:
                    a, b = (losses / self.world).tolist()
                    print(f"step {self.step} loss {a:.4f} at the perturbed point {b:.4f}")
            if self.cfg.save_every and self.step % self.cfg.save_every == 0:
                dcp.save(self.state(), checkpoint_id=os.path.join(self.cfg.out, f"s{self.step:05d}"))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=15)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--micro", type=int, default=2)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--rho", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="sam_ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    cfg = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(cfg)
    if cfg.resume:
        trainer.resume(cfg.resume)
    trainer.run()
    if cfg.export:
        sd = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
        if trainer.rank == 0:
            torch.save(sd, cfg.export)
    dist.destroy_process_group()
