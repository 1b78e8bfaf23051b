"""Meta-device construction, sharding, then materialisation and initialisation of the parameters."""

import argparse
import math
from pathlib import Path

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

VOCAB, DIM, SEQ = 48, 32, 10


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.GRU(DIM, DIM, batch_first=True)
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.fc(self.mix(self.norm(x))[0])


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, t):
        x = self.embed(t)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@torch.no_grad()
def init_weights(model, seed):
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(p)
        elif p.ndim == 1:
            nn.init.zeros_(p)
        else:
            std = 1.0 if "embed" in name else 1 / math.sqrt(p.shape[1])
            nn.init.normal_(p, 0.0, std)


def build(seed):
    with torch.device("meta"):
        model = LM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


def batch(step, size, rank, world):
    g = torch.Generator().manual_seed(31 * step + 1)
    seq = [torch.randint(VOCAB, (size,), generator=g), torch.randint(VOCAB, (size,), generator=g)]
    for _ in range(SEQ - 1):
        seq.append((seq[-1] + 7) % VOCAB if len(seq) % 2 else (seq[-2] * 3 + 1) % VOCAB)
    s = torch.stack(seq, 1)[rank::world]
    return s[:, :-1], s[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--seed", type=int, default=1234)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build(args.seed)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)

    def state():
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o}

    start = 0
    if args.resume:
        path = max(Path(args.resume).iterdir())
        s = state()
        dcp.load(s, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=s["model"], optim_state_dict=s["opt"])
        start = int(path.name)

    for step in range(start, args.steps):
        x, y = batch(step, args.batch, rank, world)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        gnorm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        opt.zero_grad()
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(state(), checkpoint_id=Path(args.out) / f"{step + 1:06d}")
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f} gnorm {gnorm.item():.3f}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
