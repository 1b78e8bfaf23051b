import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from bundle import Bundle
from gpt import build
from muon import Muon

PEAK = {"muon": 0.03, "adam": 1e-2}


def text(step, size, rank, world):
    """Repeats a word of 3 letters; the model has to look back."""
    g = torch.Generator().manual_seed(777 + step)
    word = torch.randint(20, (size, 3), generator=g)
    seq = word.repeat(1, 4)[:, :11]
    return seq.chunk(world)[rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks") and p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    opts = Bundle(model, muon=Muon(matrices), adam=torch.optim.AdamW(others, lr=1e-2, eps=1e-6))
    if args.resume:
        opts.load(args.resume)

    while opts.step_count < (args.stop_at or args.steps):
        seq = text(opts.step_count, args.batch, rank, world)
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        loss.backward()
        left = 1 - opts.step_count / args.steps
        opts.scale(min(1.0, (opts.step_count + 1) / 3, left / 0.4), PEAK)
        opts.step()
        opts.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"{opts.step_count:3d} loss {shown.item() / world:.4f}", flush=True)
        if args.out and args.save_every and opts.step_count % args.save_every == 0:
            opts.save(args.out)

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
