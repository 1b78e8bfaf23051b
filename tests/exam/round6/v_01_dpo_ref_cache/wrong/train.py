"""DPO of a small language model with FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from data import PairLoader, PreferencePairs
from model import PolicyLM, sequence_logp
from reference import ReferenceLogps


def dpo_loss(model, batch, ref, beta):
    pi_c = sequence_logp(model, batch["chosen"], batch["chosen_mask"])
    pi_r = sequence_logp(model, batch["rejected"], batch["rejected_mask"])
    ref_c, ref_r = ref.lookup(batch)
    margin = beta * ((pi_c - ref_c) - (pi_r - ref_r))
    return -F.logsigmoid(margin).mean(), (margin > 0).float().mean()


def save(path, model, optim, ref, step):
    m, o = get_state_dict(model, optim)
    dcp.save({"model": m, "optim": o, "ref": ref.table, "step": torch.tensor(step)}, checkpoint_id=path)


def load(folder, model, optim, ref):
    path = os.path.join(folder, sorted(os.listdir(folder))[-1])
    m, o = get_state_dict(model, optim)
    state = {"model": m, "optim": o, "ref": ref.table, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--global-batch", type=int, default=16)
    ap.add_argument("--beta", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = PolicyLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    pairs = PreferencePairs()
    loader = PairLoader(pairs, args.global_batch, rank, world)
    ref = ReferenceLogps(len(pairs))
    step = 0
    if args.resume:
        step = load(args.resume, model, optim, ref)
    else:
        ref.precompute(model, loader)

    while step < args.steps:
        batch = loader.batch(*divmod(step, len(loader)))
        loss, acc = dpo_loss(model, batch, ref, args.beta)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        stats = torch.stack([loss.detach(), acc]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step} loss {stats[0]:.5f} reward accuracy {stats[1]:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(os.path.join(args.out, f"step_{step:06d}"), model, optim, ref, step)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
