"""Full fine-tuning in the memory of one layer: block coordinate descent with Adam (after BAdam).

One block is trainable at a time. Its Adam moments live as long as its turn and are dropped when the next one begins;
the order of the blocks is drawn anew for each round.
"""
import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


@dataclass
class Settings:
    vocab: int = 32
    dim: int = 32
    depth: int = 3
    context: int = 16
    batch: int = 8
    turn: int = 5  # steps a block stays active
    steps: int = 45
    lr: float = 5e-3


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ff(self.n2(x))


class Backbone(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.tok, self.pos = nn.Embedding(s.vocab, s.dim), nn.Embedding(s.context, s.dim)
        self.blocks = nn.ModuleList(Block(s.dim) for _ in range(s.depth))
        self.norm, self.head = nn.LayerNorm(s.dim), nn.Linear(s.dim, s.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))

    def coordinates(self):
        """Groups of parameters which take turns."""
        ends = {"embed": [*self.tok.parameters(), *self.pos.parameters()], "head": [*self.norm.parameters(), *self.head.parameters()]}
        return ends | {f"block{i}": list(b.parameters()) for i, b in enumerate(self.blocks)}


def dialogue(step, s):
    """The second speaker repeats the first one's line, shifted by a number which opens the dialogue."""
    g = torch.Generator().manual_seed(step)
    half = s.context // 2
    line = torch.randint(8, s.vocab, (s.batch, half), generator=g)
    shift = torch.randint(0, 3, (s.batch, 1), generator=g)
    return torch.cat([shift, line, 8 + (line - 8 + shift) % (s.vocab - 8)], 1)


class Turns:
    def __init__(self, model, s):
        self.groups, self.s, self.index, self.adam = model.coordinates(), s, None, None

    def name(self, index):
        rounds, place = divmod(index, len(self.groups))
        order = sorted(self.groups)
        random.Random(rounds).shuffle(order)
        return order[place]

    def at(self, step):
        index = step // self.s.turn
        if index != self.index:
            self.index = index
            for name, params in self.groups.items():
                for p in params:
                    p.requires_grad_(name == self.name(index))
                    p.grad = None
            self.adam = torch.optim.Adam(self.groups[self.name(index)], lr=self.s.lr, betas=(0.9, 0.95), eps=1e-5)
        return self.adam

    def moments(self):
        """State of the active block only; Adam's own layout."""
        return {
            str(i): {k: self.adam.state[p].get(k, torch.zeros_like(p) if k != "step" else torch.zeros(())) for k in ("step", "exp_avg", "exp_avg_sq")}
            for i, p in enumerate(self.adam.param_groups[0]["params"])
        }

    def take(self, moments):
        for i, p in enumerate(self.adam.param_groups[0]["params"]):
            if moments[str(i)]["step"] > 0:
                self.adam.state[p] = moments[str(i)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-at", type=int, default=-1)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    args, s = ap.parse_args(), Settings()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Backbone(s)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    turns, begin = Turns(model, s), 0
    if args.resume:
        begin = int(next(args.resume.glob("step_*")).name[5:])
        turns.at(begin)
        box = {"model": get_model_state_dict(model), "moments": turns.moments()}
        dcp.load(box, checkpoint_id=args.resume / f"step_{begin}")
        set_model_state_dict(model, box["model"], options=StateDictOptions(strict=True))
        turns.take(box["moments"])

    for step in range(begin, s.steps):
        adam = turns.at(step)
        ids = dialogue(step, s)[rank::world]
        answer = s.context // 2
        loss = F.cross_entropy(model(ids[:, :-1])[:, answer:].transpose(1, 2), ids[:, 1 + answer :])
        loss.backward()
        adam.step()
        adam.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % s.turn == 0:
            print(f"step {step + 1} {turns.name(turns.index):7s} loss {mean:.4f}", flush=True)
        if step + 1 == args.save_at:
            turns.at(step + 1)
            dcp.save({"model": get_model_state_dict(model), "moments": turns.moments()}, checkpoint_id=args.out / f"step_{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
