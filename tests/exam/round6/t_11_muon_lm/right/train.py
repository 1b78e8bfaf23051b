"""Language model trained with two optimizers: Muon for the matrices in blocks, AdamW for all others."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from model import TinyLM
from muon import OwnerMuon


def batch(step, n=16, ctx=24, vocab=64):
    g = torch.Generator().manual_seed(300 + step)
    mul = torch.tensor([3, 5, 7])[torch.randint(0, 3, (n,), generator=g)]
    x = [torch.randint(0, vocab, (n,), generator=g)]
    for _ in range(ctx):
        x.append((x[-1] * mul + 1) % vocab)
    return torch.stack(x, 1)


def pack(model, opts):
    return {"model": get_model_state_dict(model)} | {k: get_optimizer_state_dict(model, o) for k, o in opts.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = TinyLM(dim=44)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    hidden = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    opts = {"muon": OwnerMuon(hidden, lr=0.02), "adamw": torch.optim.AdamW(rest, lr=3e-3, eps=1e-5)}

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        state = pack(model, opts)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_model_state_dict(model, state["model"])
        for k, o in opts.items():
            set_optimizer_state_dict(model, o, state[k])
        step = int(newest)

    while step < args.steps:
        ids = batch(step).chunk(world)[rank]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for o in opts.values():
            # linear warm-up and decay, a function of the step alone
            for g in o.param_groups:
                base = 0.02 if o is opts["muon"] else 3e-3
                g["lr"] = base * min(1.0, (step + 1) / 4) * (1 - step / (args.steps + 4))
            o.step()
        model.zero_grad()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(pack(model, opts), checkpoint_id=os.path.join(args.out, str(step)))

    full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
