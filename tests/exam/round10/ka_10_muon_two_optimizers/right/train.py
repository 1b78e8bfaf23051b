import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lm import LM, VOCAB, text
from muon import Muon


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def save(path, step, model, optimizers):
    """One file with whole tensors, independent of the number of ranks. Gathering is collective, rank 0 writes."""
    names = {p: n for n, p in model.named_parameters()}
    state = {"step": step, "model": {n: whole(p.detach()) for n, p in model.named_parameters()}, "optim": []}
    for opt in optimizers:
        state["optim"].append({names[p]: {k: whole(v) for k, v in s.items()} for p, s in opt.state.items()})
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def load(path, model, optimizers):
    state = torch.load(path)

    def like(t, p):
        if isinstance(p, DTensor) and t.shape == p.shape:
            return distribute_tensor(t, p.device_mesh, p.placements)
        return t

    params = dict(model.named_parameters())
    with torch.no_grad():
        for n, p in params.items():
            p.copy_(like(state["model"][n], p))
    for opt, saved in zip(optimizers, state["optim"], strict=True):
        for n, entries in saved.items():
            opt.state[params[n]] = {k: like(v, params[n]) for k, v in entries.items()}
    return state["step"]


def trapezoid(step, total, warm=3, cool=6):
    return min(1.0, (step + 1) / warm, (total - step) / cool)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    total_steps, batch = 18, 16
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(40)
    model = LM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    hidden = [p for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    ids = {id(p) for p in hidden}
    other = [p for p in model.parameters() if id(p) not in ids]
    optimizers = [
        Muon(hidden, lr=0.03, weight_decay=0.01),
        torch.optim.AdamW(other, lr=8e-3, betas=(0.8, 0.95), weight_decay=0.0),
    ]
    peaks = [0.03, 8e-3]

    start = 0
    if args.resume:
        newest = max(glob.glob(os.path.join(args.resume, "lm-*.pt")), key=lambda f: int(f.rsplit("-", 1)[1][:-3]))
        start = load(newest, model, optimizers)

    for step in range(start, total_steps):
        for opt, peak in zip(optimizers, peaks):
            for group in opt.param_groups:
                group["lr"] = peak * trapezoid(step, total_steps)
        seq = text(step, batch).chunk(world)[rank]
        loss = F.cross_entropy(model(seq[:, :-1]).reshape(-1, VOCAB), seq[:, 1:].reshape(-1))
        loss.backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(os.path.join(args.out, f"lm-{step + 1}.pt"), step + 1, model, optimizers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
