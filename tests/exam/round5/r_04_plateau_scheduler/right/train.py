"""Node classification; the learning rate drops whenever the validation loss stops improving."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from evaluate import validate
from gcn import GCN, shard
from graphdata import make_graph, my_slice


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--eval-every", type=int, default=2)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    adj, x, y, train_nodes, val_nodes = make_graph()
    mine = my_slice(val_nodes, rank, world)
    torch.manual_seed(0)
    model = shard(GCN())
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=1e-3)

    for step in range(1, args.steps + 1):
        g = torch.Generator().manual_seed(step)
        nodes = train_nodes[torch.randperm(len(train_nodes), generator=g)[: args.global_batch]]
        nodes = nodes.chunk(world)[rank]
        loss = F.cross_entropy(model(adj, x)[nodes], y[nodes])
        opt.zero_grad()
        loss.backward()
        opt.step()

        if step % args.eval_every == 0:
            val_loss, val_acc = validate(model, adj, x, y, mine)
            plateau.step(val_loss)
            dist.all_reduce(loss.detach())
            if rank == 0:
                lr = opt.param_groups[0]["lr"]
                print(f"step {step} loss {loss.item() / world:.4f} val {val_loss:.4f} acc {val_acc:.3f} lr {lr:g}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
