"""Node classification with a GCN, early stopping on validation loss; the best weights are the result."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from graph import GCN, make_graph


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.best_step = 0
        self.weights = None

    def update(self, value, step, model):
        if value < self.best:
            self.best, self.best_step = value, step
            self.weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
        return step - self.best_step >= self.patience

    def state_dict(self):
        return {"best": self.best, "best_step": self.best_step, "weights": self.weights}

    def load_state_dict(self, state):
        self.best, self.best_step, self.weights = state["best"], state["best_step"], state["weights"]


def gather_full(state):
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-steps", type=int, default=60)
    ap.add_argument("--patience", type=int, default=12)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    adj, x, y, given, train, val, test = make_graph()
    torch.manual_seed(0)
    model = GCN()
    for layer in (model.lin1, model.lin2):
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)
    stopper = EarlyStopping(args.patience)

    step = 0
    if args.resume:
        name = f"rank{rank}.pt"
        newest = max(Path(args.resume).glob(f"*/{name}"), key=lambda p: int(p.parent.name))
        state = torch.load(newest, weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        stopper.load_state_dict(state["stopper"])
        step = state["step"]

    # the graph is on every rank, the labelled nodes are divided
    mine = train[rank::world]
    while step < args.max_steps:
        logits = model(adj, x)
        loss = F.cross_entropy(logits[mine], given[mine], reduction="sum") * world / len(train)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        with torch.no_grad():
            val_loss = F.cross_entropy(model(adj, x)[val], y[val]).item()
        stop = stopper.update(val_loss, step, model)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} train {total.item() / world:.4f} val {val_loss:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            folder = Path(args.out) / str(step)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(),
                        "stopper": stopper.state_dict(), "step": step}, folder / f"rank{rank}.pt")
            dist.barrier()
        if stop:
            break

    model.load_state_dict(stopper.weights)
    with torch.no_grad():
        logits = model(adj, x)
    accuracy = (logits[test].argmax(1) == y[test]).float().mean().item()
    final_val = F.cross_entropy(logits[val], y[val]).item()
    if rank == 0:
        print(f"best step {stopper.best_step}: val {final_val:.4f} test accuracy {accuracy:.4f}", flush=True)
    if args.export:
        full = gather_full(model.state_dict())
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
