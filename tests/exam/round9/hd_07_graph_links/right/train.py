"""Link prediction on a social graph, FSDP2, SGD with clipped gradients."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from graph import batch, build_graph
from model import LinkPredictor
from optim import HeavyBall, clip_by_global_norm


def save(folder, step, rank, model, opt):
    os.makedirs(folder, exist_ok=True)
    state = {
        "model": {n: p.to_local() for n, p in model.state_dict().items()},
        "velocity": [opt.state[p]["velocity"].to_local() for p in model.parameters()],
        "step": step,
    }
    torch.save(state, os.path.join(folder, f"step{step:04d}_rank{rank}.pt"))
    dist.barrier()


@torch.no_grad()
def load(folder, rank, model, opt):
    name = max(f for f in os.listdir(folder) if f.endswith(f"_rank{rank}.pt"))
    state = torch.load(os.path.join(folder, name))
    for n, p in model.named_parameters():
        p.to_local().copy_(state["model"][n])
    for p, v in zip(model.parameters(), state["velocity"]):
        opt.state[p]["velocity"] = torch.zeros_like(p)
        opt.state[p]["velocity"].to_local().copy_(v)
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--clip", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    adjacency, train_edges, test_edges = build_graph()
    nodes = len(adjacency)
    torch.manual_seed(0)
    model = LinkPredictor(nodes)
    fully_shard(model)
    opt = HeavyBall(model.parameters(), lr=args.lr)
    start = load(args.resume, rank, model, opt) if args.resume else 0

    for step in range(start, args.steps):
        pairs, labels = (t.chunk(world)[rank] for t in batch(train_edges, nodes, args.batch, step))
        loss = F.binary_cross_entropy_with_logits(model(adjacency, pairs).squeeze(-1), labels)
        opt.zero_grad()
        loss.backward()
        norm = clip_by_global_norm(list(model.parameters()), args.clip)
        opt.step()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"step {step + 1} loss {shown.item() / world:.4f} grad norm {norm:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, rank, model, opt)

    with torch.no_grad():
        pairs, labels = batch(test_edges, nodes, 400, 0, seed=5)
        logits = model(adjacency, pairs).squeeze(-1)
    auc = (logits[labels == 1][:, None] > logits[labels == 0][None]).float().mean().item()
    if rank == 0:
        print(f"test AUC {auc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
