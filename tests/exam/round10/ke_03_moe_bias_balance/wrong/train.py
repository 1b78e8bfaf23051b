import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from balance import BiasBalancer
from moe import MoEModel


def batches(start, steps, batch, seq, vocab, rank, world):
    # documents come sorted by topic, a topic uses its own part of the vocabulary
    for step in range(start, steps):
        g = torch.Generator().manual_seed(500 + step)
        topic = torch.arange(batch) * 4 // batch
        first = torch.randint(0, vocab // 4, (batch, 1), generator=g)
        stride = torch.randint(1, 3, (batch, 1), generator=g)
        ids = topic[:, None] * (vocab // 4) + (first + stride * torch.arange(seq + 1)) % (vocab // 4)
        n = batch // world
        mine = ids[rank * n : (rank + 1) * n]
        yield step, mine[:, :-1], mine[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    ap.add_argument("--export", type=Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = MoEModel()
    for moe in model.moe:
        fully_shard(moe)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    balancer = BiasBalancer(model, rate=0.02)

    start = 0
    if args.resume:
        newest = sorted(args.resume.glob("ckpt-*"))[-1]
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step, x, y in batches(start, args.steps, 16, 12, 40, rank, world):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        spread = balancer.after_step()
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} loss {value.item() / world:.4f} max/mean load {spread:.2f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step + 1}, checkpoint_id=args.out / f"ckpt-{step + 1:04d}")

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
