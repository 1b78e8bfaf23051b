"""Train a small GPT on a shuffled stream of batches, with checkpoints.

rule: scheduler-or-progress-not-restored
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
from torch.optim.lr_scheduler import LambdaLR

VOCAB, SEQ, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 2
GLOBAL_BATCH, SAMPLES, STEPS, SEED = 16, 512, 20, 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
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


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default=None, help="folder with step_* checkpoints")
    return parser.parse_args()


def warmup(step):
    return min(1.0, (step + 1) / 8)


def batch_stream(tokens, rank, world):
    """Endless batches of this rank, reshuffled in every epoch."""
    local, epoch = GLOBAL_BATCH // world, 0
    while True:
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(GLOBAL_BATCH):
            yield tokens[chosen[rank * local : (rank + 1) * local]]
        epoch += 1


def save(path, model, optimizer, scheduler, step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
        "step": step,
    }
    dcp.save(state, checkpoint_id=path)


def load(path, model, optimizer, scheduler):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
        "step": 0,
    }
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(SEED)
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, warmup)
    done = load(latest_checkpoint(args.resume), model, optimizer, scheduler) if args.resume else 0

    stream = batch_stream(make_sequences(SAMPLES), rank, world)
    for step in range(done, args.steps):
        batch = next(stream)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(Path(args.out) / f"step_{step + 1:06d}", model, optimizer, scheduler, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
