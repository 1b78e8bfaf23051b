"""Language model on data shards with a loader position that is checkpointed.

rule: per-rank-state-deduplicated
save_args: --save-every 3 --out {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, WIDTH, LAYERS = 32, 12, 32, 3
GLOBAL_BATCH, SAMPLES, STEPS = 24, 768, 20


class ResidualMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TokenMLP(nn.Module):
    def __init__(self, vocab=VOCAB, width=WIDTH, layers=LAYERS):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([ResidualMLP(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_sequences(samples, seed=0):
    """Token sequences where the next token is 5 * token + 3 plus one random bit, modulo the vocabulary."""
    gen = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(SEQ):
        bit = torch.randint(0, 2, (samples,), generator=gen)
        tokens.append((5 * tokens[-1] + 3 + bit) % VOCAB)
    return torch.stack(tokens, dim=1)


def latest_checkpoint(folder):
    complete = [p.parent for p in Path(folder).glob("step_*/.metadata")]
    if not complete:
        raise SystemExit(f"no checkpoint in {folder}")
    return max(complete, key=lambda p: p.name)


class RankLoader:
    """Batches of one rank; the position is the index of its next sample."""

    def __init__(self, tokens, rank, world):
        self.tokens, self.size = tokens, GLOBAL_BATCH // world
        self.position = torch.tensor(rank * self.size)

    def next(self):
        first = self.position.item()
        self.position = (self.position + GLOBAL_BATCH) % SAMPLES
        return self.tokens[first : first + self.size]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def snapshot(model, optimizer, loader, step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "loader": loader.state_dict(), "step": step}


def resume(folder, model, optimizer, loader):
    state = snapshot(model, optimizer, loader, 0)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loader.load_state_dict(state["loader"])
    return state["step"]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default=None, help="folder with step_* checkpoints")
    return parser.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    model = TokenMLP()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = RankLoader(make_sequences(SAMPLES), rank, world)
    done = resume(latest_checkpoint(args.resume), model, optimizer, loader) if args.resume else 0

    for step in range(done + 1, args.steps + 1):
        batch = loader.next()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(model, optimizer, loader, step), checkpoint_id=Path(args.out) / f"step_{step:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
