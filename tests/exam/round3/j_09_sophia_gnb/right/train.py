"""Small language model with a second-order optimizer (Sophia-G)."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from chars import VOCAB, corpus, windows
from lm import NGramNet
from sophia import SophiaG


def sampled_labels(logits, step, rank, world):
    """Labels from the model's own distribution; the noise belongs to the sample, not to the rank."""
    g = torch.Generator().manual_seed(70000 + step)
    u = torch.rand(logits.size(0) * world, VOCAB, generator=g)
    u = u.view(world, -1, VOCAB)[rank].clamp(1e-9, 1 - 1e-7)
    return (logits.detach() - torch.log(-torch.log(u))).argmax(-1)


def hessian_pass(model, optim, x, step, rank, world):
    logits = model(x)
    y = sampled_labels(logits, step, rank, world)
    F.cross_entropy(logits, y).backward()
    optim.update_hessian(batch_size=x.size(0) * world)
    optim.zero_grad()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--hess-every", type=int, default=4)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    text = corpus()
    torch.manual_seed(13)
    model = NGramNet()
    fully_shard(model.hidden)
    fully_shard(model)
    optim = SophiaG(model.parameters(), lr=args.lr, rho=1.0)

    for step in range(args.steps):
        x, y = windows(text, step, args.batch, rank, world)
        if step % args.hess_every == 0:
            hessian_pass(model, optim, x, step, rank, world)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:3d}  ce {mean.item() / world:.4f}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
