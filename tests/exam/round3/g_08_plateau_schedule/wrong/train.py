"""Fine-tuning on a small token set: the learning rate is lowered whenever the validation loss stops falling."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau

VOCAB, WIDTH, LENGTH = 24, 24, 12


class Mixer(nn.Module):
    """causal token mixing with a learned lower-triangular matrix"""

    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.ff = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        y = F.linear(self.ln(x).transpose(1, 2), self.mix.weight.tril(), self.mix.bias).transpose(1, 2)
        x = x + y
        return x + self.ff(x)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Sequential(Mixer(), Mixer())
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.body(self.emb(ids)))


def make_rows(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    start, step = torch.randint(0, VOCAB, (n, 1), generator=g), torch.randint(1, 4, (n, 1), generator=g)
    rows = (start + step * torch.arange(LENGTH + 1)) % VOCAB
    flip = torch.rand(rows.shape, generator=g) < noise
    return torch.where(flip, torch.randint(0, VOCAB, rows.shape, generator=g), rows)


def token_loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])


@torch.no_grad()
def validate(model, rows):
    model.eval()
    loss = torch.stack([token_loss(model, part) for part in rows.split(8)]).mean()
    model.train()
    return loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--val-every", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    model = LM()
    for mixer in model.body:
        fully_shard(mixer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    train_rows = make_rows(192, seed=1, noise=0.05)
    # the second half of the validation set comes from a noisier source
    val_rows = torch.cat([make_rows(32, seed=2, noise=0.05), make_rows(32, seed=3, noise=0.4)])
    val_rows = val_rows.chunk(world)[rank]

    start = 0
    if args.resume:
        path = max(glob.glob(os.path.join(args.resume, "step*")), key=lambda p: int(p.rsplit("step", 1)[1]))
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optim": o, "scheduler": scheduler.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["step"]

    for step in range(start + 1, args.steps + 1):
        pick = torch.randint(0, len(train_rows), (args.batch,), generator=torch.Generator().manual_seed(step))
        loss = token_loss(model, train_rows[pick[rank::world]])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.val_every == 0:
            val = validate(model, val_rows)
            scheduler.step(val.item())
            dist.all_reduce(val)
            val /= world
            if rank == 0:
                print(
                    f"step {step} loss {loss.item():.4f} val {val.item():.4f} lr {optimizer.param_groups[0]['lr']:.5f}",
                    flush=True,
                )
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            state = {"model": m, "optim": o, "scheduler": scheduler.state_dict(), "step": step}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"step{step}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
