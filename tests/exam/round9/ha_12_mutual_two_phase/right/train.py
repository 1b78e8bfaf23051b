"""Phase 1: two different models teach each other. Phase 2: both, frozen, teach a small one."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from nets import LENGTH, VOCAB, BigramMlp, ConvLM, GruLM
from phases import Learner, Phase, ensemble_step, mutual_step


def batch(step, size, rank, world):
    g = torch.Generator().manual_seed(800 + step)
    rows = [torch.randint(0, VOCAB, (size,), generator=g) for _ in range(2)]
    for _ in range(LENGTH - 1):
        noise = torch.rand(size, generator=g) < 0.05
        follow = (rows[-1] + 2 * (rows[-2] % 5) + 1) % VOCAB
        rows.append(torch.where(noise, torch.randint(0, VOCAB, (size,), generator=g), follow))
    rows = torch.stack(rows, 1)[rank::world]
    return rows[:, :-1], rows[:, 1:]


def learner(name, net, lr):
    if isinstance(net, ConvLM):
        fully_shard([net.norm, net.head])
    fully_shard(net)
    return Learner(name, net, torch.optim.Adam(net.parameters(), lr=lr, eps=1e-6))


def contents(x, started):
    """What is kept of a learner; before its first step its optimizer has no state."""
    if not started:
        return {"weights": get_model_state_dict(x.model)}
    weights, optim = get_state_dict(x.model, x.optimizer)
    return {"weights": weights, "optim": optim}


def snapshot(learners, at):
    state = {"at": at, "histories": {x.name: x.history for x in learners}}
    for x in learners:
        state[x.name] = contents(x, started=bool(x.history))
    return state


def restore(folder, learners):
    newest = max(os.listdir(folder), key=lambda n: int(n.split("_")[-1]))
    path = os.path.join(folder, newest)
    head = {"at": 0, "histories": {x.name: [] for x in learners}}
    dcp.load(head, checkpoint_id=path)
    for x in learners:
        x.history = head["histories"][x.name]
        state = {x.name: contents(x, started=bool(x.history))}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(x.model, state[x.name]["weights"])
        if x.history:
            set_optimizer_state_dict(x.model, x.optimizer, state[x.name]["optim"])
    return head["at"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--mutual-steps", type=int, default=12)
    ap.add_argument("--ensemble-steps", type=int, default=12)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(10)
    gru, conv = learner("gru", GruLM(), 6e-3), learner("conv", ConvLM(), 6e-3)
    small = learner("small", BigramMlp(), 8e-3)
    everyone = [gru, conv, small]
    phases = [Phase("mutual", args.mutual_steps, lambda *b: mutual_step(gru, conv, *b)),
              Phase("ensemble", args.ensemble_steps, lambda *b: ensemble_step(small, [gru, conv], *b))]

    done = restore(args.resume, everyone) if args.resume else 0
    at = 0
    for phase in phases:
        for step in range(phase.steps):
            at += 1
            if at <= done:
                continue
            if phase.name == "ensemble":
                for teacher in (gru, conv):
                    teacher.model.requires_grad_(False).eval()
            phase.run(*batch(at, args.batch, rank, world), step)
            if rank == 0:
                last = "  ".join(f"{x.name} {x.history[-1]:.5f}" for x in everyone if x.history)
                print(f"{phase.name:8s} {at:3d}  {last}")
            if args.save_every and at % args.save_every == 0:
                dcp.save(snapshot(everyone, at), checkpoint_id=os.path.join(args.out, f"at_{at}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
