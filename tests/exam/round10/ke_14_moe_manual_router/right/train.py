"""Mixture of experts whose routers are not sharded: FSDP ignores them and their gradients are reduced by hand."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from moe import TabularMoE
from replicated import ReplicatedGrads, clip_all

EXPERTS = 4


def table(step, rank, world, n=32):
    g = torch.Generator().manual_seed(step + 60)
    x = torch.randn(n, 8, generator=g)
    kind = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    options = torch.stack([x[:, 2], -x[:, 3], x[:, 4] * x[:, 5], x[:, 6].abs()], 1)
    y = options.gather(1, kind[:, None]).squeeze(1)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def balance_loss(stats, world):
    """experts * sum(share of tokens * mean probability), both over the global batch as in the Switch transformer.

    The token shares are constants and are summed over the ranks; the local mean probability is this rank's part.
    """
    total = 0.0
    for probs, used in stats:
        used = used.detach().clone()
        dist.all_reduce(used)
        total = total + EXPERTS * (probs * used / world).sum()
    return total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(50)
    model = TabularMoE(experts=EXPERTS)
    routers = {p for layer in model.moe for p in layer.router.parameters()}
    for layer in model.moe:
        fully_shard(layer, ignored_params=set(layer.router.parameters()))
    fully_shard(model, ignored_params=routers)
    replicated = [p for n, p in model.named_parameters() if ".router." in n]
    sharded = [p for n, p in model.named_parameters() if ".router." not in n]
    by_hand = ReplicatedGrads(replicated)
    optim = torch.optim.RMSprop(
        [{"params": sharded, "lr": 1e-3}, {"params": replicated, "lr": 5e-4}], eps=1e-4, momentum=0.5
    )

    start = 0
    if args.resume:
        newest = max(args.resume.iterdir(), key=lambda p: int(p.name))
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step in range(start, args.steps):
        x, y = table(step, rank, world)
        out, stats = model(x)
        fit = F.mse_loss(out.squeeze(-1), y)
        loss = fit + 0.02 * balance_loss(stats, world)
        loss.backward()
        by_hand.reduce()
        norm = clip_all(sharded, replicated, 1.0)
        optim.step()
        optim.zero_grad()
        value = fit.detach().clone()
        dist.all_reduce(value)
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1} mse {value.item() / world:.4f} norm {norm:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step + 1}, checkpoint_id=args.out / str(step + 1))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
