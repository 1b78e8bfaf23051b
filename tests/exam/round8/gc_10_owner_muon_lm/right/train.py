import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gpt import GPT
from muon import Muon


def walks(n, vocab, gen, length=19):
    """Walks through a fixed permutation of the vocabulary; every sixth token jumps."""
    follow = torch.randperm(vocab, generator=torch.Generator().manual_seed(14))
    ids = torch.randint(0, vocab, (n, length), generator=gen)
    jump = torch.rand(n, length, generator=gen) < 1 / 6
    for t in range(1, length):
        ids[:, t] = torch.where(jump[:, t], ids[:, t], follow[ids[:, t - 1]])
    return ids


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = GPT()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    matrices = [p for n, p in model.blocks.named_parameters() if p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if not (n.startswith("blocks.") and p.ndim == 2)]
    optims = [Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    # both rates stay and then fall linearly in the last third
    scheds = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, 3 * (args.steps - s) / args.steps)) for o in optims]
    gen = torch.Generator().manual_seed(13)
    step = 0

    def gather_state():
        m, o = get_state_dict(model, optims)
        return {"model": m, "optim": o, "scheds": [s.state_dict() for s in scheds], "gen": gen.get_state(), "step": step}

    if args.resume:
        state = gather_state()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume), key=int)))
        set_state_dict(model, optims, model_state_dict=state["model"], optim_state_dict=state["optim"])
        for s, sd in zip(scheds, state["scheds"]):
            s.load_state_dict(sd)
        gen.set_state(state["gen"])
        step = state["step"]

    while step < args.steps:
        ids = walks(args.batch, 40, gen).chunk(world)[rank]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for o, s in zip(optims, scheds):
            o.step()
            s.step()
            o.zero_grad()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 4 == 0:
            print(f"{step} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            dcp.save(gather_state(), checkpoint_id=os.path.join(args.out, str(step)))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
