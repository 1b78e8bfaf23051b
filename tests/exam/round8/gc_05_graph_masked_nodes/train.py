import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from gcn import GCN
from graphs import GraphSet

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def node_loss(logits, y, mask, world):
    """Mean over the labelled nodes of the batch."""
    total = F.cross_entropy(logits[mask], y[mask], reduction="sum")
    count = mask.sum()
    dist.all_reduce(count)
    return total * world / count


@torch.no_grad()
def accuracy(model, data, rank, world):
    x, adj, y, mask = data.collate(range(rank, len(data), world))
    hit = (model(x, adj).argmax(-1) == y)[mask]
    s = torch.tensor([hit.sum(), hit.numel()])
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def save(path, model, optim, step, rank):
    state = {"model": get_model_state_dict(model, options=FULL), "optim": get_optimizer_state_dict(model, optim, options=FULL), "step": step}
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def resume(path, model, optim):
    state = torch.load(path, weights_only=True)
    set_model_state_dict(model, state["model"], options=LOAD)
    set_optimizer_state_dict(model, optim, state["optim"], options=LOAD)
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = GraphSet(96, seed=1), GraphSet(32, seed=2)
    torch.manual_seed(0)
    model = GCN()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = resume(os.path.join(args.resume, "last.pt"), model, optim) if args.resume else 0

    n_batches = len(train) // args.batch
    while step < args.steps:
        epoch, k = divmod(step, n_batches)
        order = torch.randperm(n_batches, generator=torch.Generator().manual_seed(epoch)).tolist()
        # a batch has graphs of all sizes, every rank takes graphs of about one size (less padding)
        first = order[k]
        ids = torch.arange(len(train)).view(args.batch, n_batches)[:, first].chunk(world)[rank].tolist()
        x, adj, y, mask = train.collate(ids)
        loss = node_loss(model(x, adj), y, mask, world)
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optim.step()
        step += 1
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            acc = accuracy(model, test, rank, world)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f} test accuracy {acc:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(os.path.join(args.out, "last.pt"), model, optim, step, rank)

    if args.export:
        weights = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
