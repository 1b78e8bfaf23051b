"""Fine-tune a pre-trained encoder as a classifier with FSDP2.

The encoder is pre-trained on reconstruction on rank 0 (standing in for "download the weights"), then the
classifier is fine-tuned on all ranks.

    torchrun --standalone --nproc-per-node 2 train.py --steps 30
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

DIM, HID, CLASSES, N = 24, 48, 5, 640


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(DIM, HID)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(HID), nn.Linear(HID, HID), nn.GELU(), nn.Linear(HID, HID)) for _ in range(2)
        )

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = h + layer(h)
        return h


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.norm = nn.LayerNorm(HID)
        self.head = nn.Linear(HID, CLASSES)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))


def dataset(seed=7):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=g)
    y = torch.randint(0, CLASSES, (N,), generator=g)
    x = centres[y] + 0.9 * torch.randn(N, DIM, generator=g)
    return x, y


def pretrained_encoder_weights(x):
    torch.manual_seed(99)
    enc, dec = Encoder(), nn.Linear(HID, DIM)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=3e-3)
    g = torch.Generator().manual_seed(5)
    for _ in range(80):
        xb = x[torch.randint(0, len(x), (64,), generator=g)]
        loss = F.mse_loss(dec(enc(xb * (torch.rand(xb.shape, generator=g) > 0.3))), xb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return enc.state_dict()


def latest(folder):
    files = sorted(f for f in os.listdir(folder) if f.startswith("ckpt_") and f.endswith(".pt"))
    return os.path.join(folder, files[-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    x, y = dataset()
    torch.manual_seed(0)
    model = Classifier()
    if rank == 0 and not args.resume:
        model.encoder.load_state_dict(pretrained_encoder_weights(x))
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)

    for layer in model.encoder.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    start = 0
    if args.resume:
        ckpt = torch.load(latest(args.resume), map_location="cpu")
        set_model_state_dict(model, ckpt["model"], options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(model, opt, ckpt["optim"], options=StateDictOptions(full_state_dict=True))
        start = ckpt["step"]

    local = args.batch // world
    for step in range(start, args.steps):
        idx = torch.randint(0, N, (args.batch,), generator=torch.Generator().manual_seed(10_000 + step))
        mine = idx[rank * local : (rank + 1) * local]
        loss = F.cross_entropy(model(x[mine]), y[mine])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            state = {
                "model": get_model_state_dict(model, options=full),
                "optim": get_optimizer_state_dict(model, opt, options=full),
                "step": step + 1,
            }
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                path = os.path.join(args.out, f"ckpt_{step + 1:06d}.pt")
                torch.save(state, path + ".tmp")
                os.replace(path + ".tmp", path)
            dist.barrier()

    if args.export:
        weights = get_model_state_dict(model, options=full)
        if rank == 0:
            torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
