"""Three phases: (1) masked-column pretraining, (2) closed-form head, (3) fine-tuning held near the pretrained encoder."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

import ridge
from net import COLS, TabularNet


@dataclass
class Plan:
    pretrain: int = 18
    finetune: int = 14
    batch: int = 120
    hide: float = 0.3
    lam: float = 1.0
    pull: float = 1e-2

    @property
    def total(self):
        return self.pretrain + self.finetune


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 4, generator=g)
    mix = torch.linspace(-3, 3, 4 * COLS).view(4, COLS).cos()
    x = torch.tanh(z @ mix) + 0.1 * torch.randn(n, COLS, generator=g)
    y = torch.stack([z[:, 0] * z[:, 1], z[:, 2].sin(), z[:, 3] + z[:, 0]], 1)
    return x, y


class Run:
    def __init__(self, plan):
        self.plan = plan
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.x, self.y = table(960, 1)
        torch.manual_seed(9)
        self.model = TabularNet()
        for layer in self.model.encoder:
            fully_shard(layer)
        fully_shard(self.model)
        self.g = torch.Generator().manual_seed(2)
        self.step = 0
        self.anchor = None
        self.start_phase()

    def start_phase(self):
        """The trained parameters and the optimizer of the phase that self.step lies in."""
        m = self.model
        pre = self.step < self.plan.pretrain
        for p in m.parameters():
            p.requires_grad_(True)
        idle = m.head if pre else m.decoder
        for p in idle.parameters():
            p.requires_grad_(False)
        trained = [p for p in m.parameters() if p.requires_grad]
        self.opt = torch.optim.AdamW(trained, lr=4e-3) if pre else torch.optim.SGD(trained, lr=1e-3, momentum=0.9)

    def shard(self, t):
        return t.chunk(self.world)[self.rank]

    def rows(self):
        return torch.randint(0, len(self.x), (self.plan.batch,), generator=self.g)

    def pretrain_loss(self):
        x = self.x[self.rows()]
        hidden = torch.rand(x.shape, generator=self.g) < self.plan.hide
        n = hidden.sum()        # of the global batch, which every rank draws in full
        x, hidden = self.shard(x), self.shard(hidden)
        err = (self.model(x, hidden, "decoder") - x).square()
        return (err * hidden).sum() * self.world / n

    def finetune_loss(self):
        rows = self.shard(self.rows())
        x = self.x[rows]
        pred = self.model(x, torch.zeros_like(x, dtype=torch.bool), "head")
        return (pred - self.y[rows]).square().mean()

    @torch.no_grad()
    def solve_head(self):
        x, y = self.shard(self.x), self.shard(self.y)
        f = self.model(x, torch.zeros_like(x, dtype=torch.bool), "features")
        self.model.reshard()        # there is no backward that does it for the root
        weight, bias = ridge.fit(f, y, self.plan.lam)
        set_model_state_dict(self.model, {"head.weight": weight, "head.bias": bias},
                             options=StateDictOptions(full_state_dict=True, strict=False))

    def advance(self):
        if self.step == self.plan.pretrain:
            self.solve_head()
            self.start_phase()
            self.anchor = {n: p.detach().clone() for n, p in self.model.named_parameters() if n.startswith("encoder")}
        pre = self.step < self.plan.pretrain
        loss = self.pretrain_loss() if pre else self.finetune_loss()
        self.opt.zero_grad()
        loss.backward()
        if not pre:
            with torch.no_grad():
                for n, p in self.model.named_parameters():
                    if n in self.anchor:
                        p.grad.add_(p.detach() - self.anchor[n], alpha=self.plan.pull)
        self.opt.step()
        self.step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        return ("pretrain" if pre else "finetune"), loss.item() / self.world

    # checkpoints -----------------------------------------------------------------------------------------------

    def state(self):
        st = {"model": get_model_state_dict(self.model), "optim": get_optimizer_state_dict(self.model, self.opt),
              "rng": self.g.get_state()}
        if self.anchor is not None:
            st["anchor"] = self.anchor
        return st

    def save(self, root):
        dcp.save(self.state(), checkpoint_id=os.path.join(root, f"{self.step:04d}"))

    def load(self, root):
        name = max(os.listdir(root))
        self.step = int(name)
        # a checkpoint at the very border was written before the head was solved
        if self.step > self.plan.pretrain:
            self.start_phase()
            self.anchor = {n: torch.zeros_like(p.detach()) for n, p in self.model.named_parameters()
                           if n.startswith("encoder")}
        else:
            self.step = min(self.step, self.plan.pretrain - 1)
            self.start_phase()
            self.step = int(name)
        st = self.state()
        dcp.load(st, checkpoint_id=os.path.join(root, name))
        set_model_state_dict(self.model, st["model"])
        set_optimizer_state_dict(self.model, self.opt, st["optim"])
        self.g.set_state(st["rng"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--save-steps", type=int, nargs="*", default=[])
    p.add_argument("--ckpt")
    p.add_argument("--resume")
    p.add_argument("--result")
    a = p.parse_args()
    dist.init_process_group("gloo")
    run = Run(Plan())
    if a.resume:
        run.load(a.resume)
    while run.step < run.plan.total:
        phase, loss = run.advance()
        if run.rank == 0 and run.step % 6 == 0:
            print(f"{phase} step {run.step} loss {loss:.4f}")
        if run.step in a.save_steps:
            run.save(a.ckpt)
    full = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if run.rank == 0 and a.result:
        torch.save(full, a.result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
