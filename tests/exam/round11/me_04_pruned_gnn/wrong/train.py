"""Node classification with a GCN that is pruned to 80 % while it trains."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gnn import GCN, make_graph
from pruning import MagnitudePruner


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=70)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out")
    p.add_argument("--resume")
    return p.parse_args()


def shard_file(folder, step):
    return os.path.join(folder, f"ckpt-{step:06d}-rank{dist.get_rank()}.pt")


def save_checkpoint(folder, step, model, opt, sched, pruner):
    os.makedirs(folder, exist_ok=True)
    torch.save(
        {
            "step": step,
            "model": {n: p.to_local() for n, p in model.state_dict().items()},
            "opt": opt.state_dict(),
            "sched": sched.state_dict(),
        },
        shard_file(folder, step),
    )
    dist.barrier()


def load_checkpoint(folder, model, opt, sched, pruner):
    step = max(int(f.split("-")[1]) for f in os.listdir(folder) if f.startswith("ckpt-"))
    state = torch.load(shard_file(folder, step), weights_only=False)
    with torch.no_grad():
        for n, p in model.state_dict().items():
            p.to_local().copy_(state["model"][n])
    opt.load_state_dict(state["opt"])
    sched.load_state_dict(state["sched"])
    return state["step"]


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = GCN()
    mesh = init_device_mesh("cpu", (world,))
    for conv in (model.conv1, model.conv2, model.conv3):
        fully_shard(conv, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps, eta_min=0.02)
    pruner = MagnitudePruner(list(model.named_parameters()), begin=10, end=40, every=5, target=0.8)

    adj, x, y = make_graph()
    train_nodes = torch.arange(0, 160).chunk(world)[rank]
    test_nodes = torch.arange(160, 240)

    first = load_checkpoint(args.resume, model, opt, sched, pruner) + 1 if args.resume else 1
    for step in range(first, args.steps + 1):
        opt.zero_grad()
        loss = F.cross_entropy(model(adj, x)[train_nodes], y[train_nodes])
        loss.backward()
        opt.step()
        sched.step()
        pruner.after_step(step)
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach().clone())
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f} target sparsity {pruner.sparsity_at(step):.2f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save_checkpoint(args.out, step, model, opt, sched, pruner)

    with torch.no_grad():
        acc = (model(adj, x)[test_nodes].argmax(1) == y[test_nodes]).float().mean()
    model.reshard()
    sparsity = pruner.measured()
    if rank == 0:
        print(f"test accuracy {acc.item():.3f} sparsity {sparsity:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
