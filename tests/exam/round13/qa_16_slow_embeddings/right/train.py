"""Multilingual pre-training with rare words: the word matrices move once in `period` steps, on the sum of the
gradients of all these steps; the body of the model moves every step."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

V, D, T = 60, 32, 14


class GRULayer(nn.Module):
    """Residual recurrent layer (a minimal gated unit, all gates from the input)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.inp = nn.Linear(D, 2 * D)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x):
        gate, cand = self.inp(self.norm(x)).chunk(2, -1)
        gate, cand = gate.sigmoid(), cand.tanh()
        h, outs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = gate[:, t] * h + (1 - gate[:, t]) * cand[:, t]
            outs.append(h)
        return x + self.out(torch.stack(outs, 1))


class RecurrentLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.body = nn.ModuleList(GRULayer() for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.unembed = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.body:
            x = layer(x)
        return self.unembed(self.norm(x))


def text(step, rows=8):
    """Three languages of 20 words; within a language the next word follows from the last one, mostly."""
    g = torch.Generator().manual_seed(step + 77)
    lang = torch.randint(0, 3, (rows, 1), generator=g)
    words = torch.randint(0, 20, (rows, 1), generator=g)
    for _ in range(T):
        nxt = (words[:, -1:] * (lang + 1) + 3) % 20
        rare = torch.rand(rows, 1, generator=g) < 0.1
        words = torch.cat([words, torch.where(rare, torch.randint(0, 20, (rows, 1), generator=g), nxt)], 1)
    return words + 20 * lang


class Run:
    def __init__(self, flags):
        self.flags, self.step = flags, 0
        torch.manual_seed(8)
        self.model = RecurrentLM()
        for layer in self.model.body:
            fully_shard(layer)
        fully_shard(self.model)
        lexical = [self.model.words.weight, self.model.unembed.weight]
        body = [p for p in self.model.parameters() if all(p is not w for w in lexical)]
        self.lexical = dict(zip(("words", "unembed"), lexical))
        self.fast = torch.optim.AdamW(body, lr=6e-3, eps=1e-6)
        self.slow = torch.optim.Adam(lexical, lr=2e-2, betas=(0.8, 0.98), eps=1e-6)

    def state(self):
        waiting = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in self.lexical.items()}
        return {
            "model": get_model_state_dict(self.model),
            "waiting": waiting,
            "step": torch.tensor(self.step),
        }

    def path(self, root, step, part):
        return os.path.join(root, f"{step:04d}", part)

    def save(self, root):
        dcp.save(self.state(), checkpoint_id=self.path(root, self.step, "train"))
        for name, opt in (("fast", self.fast), ("slow", self.slow)):
            dcp.save(get_optimizer_state_dict(self.model, opt), checkpoint_id=self.path(root, self.step, name))

    def load(self, root):
        step = max(int(d) for d in os.listdir(root))
        for name, opt in (("fast", self.fast), ("slow", self.slow)):
            box = get_optimizer_state_dict(self.model, opt)
            dcp.load(box, checkpoint_id=self.path(root, step, name))
            set_optimizer_state_dict(self.model, opt, box)
        box = self.state()
        dcp.load(box, checkpoint_id=self.path(root, step, "train"))
        set_model_state_dict(self.model, box["model"])
        self.step = int(box["step"])
        if self.step % self.flags.period:
            for n, w in self.lexical.items():
                w.grad = box["waiting"][n]

    def train_step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        ids = text(self.step)[rank::world]
        loss = F.cross_entropy(self.model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        loss.backward()
        self.fast.step()
        self.fast.zero_grad()
        self.step += 1
        if self.step % self.flags.period == 0:
            for w in self.lexical.values():
                w.grad.div_(self.flags.period)
            self.slow.step()
            self.slow.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and self.step % 4 == 0:
            print(f"step {self.step}: {mean:.4f}", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--period", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    flags = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(flags)
    if flags.resume:
        run.load(flags.resume)
    while run.step < flags.steps:
        run.train_step()
        if flags.save_every and run.step % flags.save_every == 0 and run.step < flags.steps:
            run.save(flags.out)
    dist.destroy_process_group()
