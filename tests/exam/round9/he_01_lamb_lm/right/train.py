"""Train a small causal language model with LAMB under FSDP2."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lamb import Lamb
from model import TinyLM

VOCAB, CTX, BATCH = 48, 24, 16


def make_corpus(n, seed):
    """A noisy second-order chain: next = (2 * a + b + small noise) mod VOCAB."""
    g = torch.Generator().manual_seed(seed)
    ids = [3, 5]
    noise = torch.randint(0, 3, (n,), generator=g).tolist()
    for i in range(n - 2):
        ids.append((2 * ids[-2] + ids[-1] + noise[i]) % VOCAB)
    return torch.tensor(ids)


def get_batch(corpus, step, rank, world):
    g = torch.Generator().manual_seed(9000 + step)
    starts = torch.randint(0, len(corpus) - CTX - 1, (BATCH,), generator=g)[rank::world]
    rows = torch.stack([corpus[s : s + CTX + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def lr_at(step, total, peak):
    warm = 3
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def newest(folder):
    steps = [int(d.split("_")[1]) for d in os.listdir(folder) if d.startswith("step_")]
    return os.path.join(folder, f"step_{max(steps)}")


def save(folder, step, model, opt):
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "optim": osd, "step": torch.tensor(step)}, checkpoint_id=os.path.join(folder, f"step_{step}"))


def load(folder, model, opt):
    msd, osd = get_state_dict(model, opt)
    state = {"model": msd, "optim": osd, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=newest(folder))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(11)
    model = TinyLM(VOCAB, 32, 2, 4, CTX)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = Lamb(model.parameters(), lr=args.lr)

    corpus = make_corpus(4000, seed=1)
    start = load(args.resume, model, opt) if args.resume else 0

    for step in range(start, args.steps):
        for group in opt.param_groups:
            group["lr"] = lr_at(step, args.steps, args.lr)
        x, y = get_batch(corpus, step, rank, world)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 4 == 0 or step == args.steps - 1):
            print(f"step {step:3d} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt)

    if args.export:
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
