"""Node classification: the whole graph on every rank, the labelled nodes divided among the ranks."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gcn import GCN
from graph import block_graph


def minibatches(nodes, epoch, size):
    g = torch.Generator().manual_seed(epoch)
    return nodes[torch.randperm(len(nodes), generator=g)].split(size)


def validation_loss(model, graph, rank, world):
    nodes = graph["valid"].tensor_split(world)[rank]
    with torch.no_grad():
        logits = model(graph["x"], graph["adj"], nodes)
        loss = F.cross_entropy(logits, graph["y"][nodes], reduction="sum")
        dist.all_reduce(loss)
    return loss.item() / len(graph["valid"])


def accuracy(model, graph, nodes):
    with torch.no_grad():
        pred = model(graph["x"], graph["adj"], nodes).argmax(-1)
    return (pred == graph["y"][nodes]).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--checkpoints", type=Path)
    ap.add_argument("--checkpoint-every", type=int, default=10)
    ap.add_argument("--continue-from", type=Path)
    ap.add_argument("--model-out", type=Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    graph = block_graph()

    torch.manual_seed(4)
    model = GCN(graph["x"].shape[1], 4)
    for conv in model.convs:
        fully_shard(conv)
    fully_shard(model)
    opt = torch.optim.NAdam(model.parameters(), lr=args.lr)
    plateau = ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=0.01)

    start = 0
    if args.continue_from:
        newest = max(args.continue_from.iterdir(), key=lambda p: int(p.name.split("-")[1]))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "plateau": plateau.state_dict(), "epoch": 0}
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        plateau.load_state_dict(state["plateau"])
        start = state["epoch"]

    for epoch in range(start, args.epochs):
        for nodes in minibatches(graph["train"], epoch, 80):
            mine = nodes.chunk(world)[rank]
            loss = F.cross_entropy(model(graph["x"], graph["adj"], mine), graph["y"][mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
        val = validation_loss(model, graph, rank, world)
        plateau.step(val)
        if rank == 0:
            print(f"epoch {epoch} train {loss.item():.4f} valid {val:.4f} lr {opt.param_groups[0]['lr']:.5f}")
        if args.checkpoints and (epoch + 1) % args.checkpoint_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "plateau": plateau.state_dict(), "epoch": epoch + 1},
                     checkpoint_id=args.checkpoints / f"epoch-{epoch + 1}")

    acc = accuracy(model, graph, graph["test"])
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"test accuracy {acc:.4f}")
        if args.model_out:
            torch.save(weights, args.model_out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
