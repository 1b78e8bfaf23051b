"""Node classification with GraphSAGE on seed-node batches, sharded with FSDP2."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from graph import CommunityGraph
from loader import SeedNodeLoader
from model import GraphSage


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.graph = CommunityGraph()
        torch.manual_seed(args.seed)
        self.model = GraphSage(16, 48, 6)
        for layer in (self.model.first, self.model.second):
            fully_shard(layer)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=4e-3, weight_decay=1e-3)
        self.loader = SeedNodeLoader(self.graph.train_nodes, args.batch, self.rank, self.world, seed=args.seed)
        self.step = 0

    def save(self):
        path = Path(self.args.out) / f"{self.step:06d}"
        model, optim = get_state_dict(self.model, self.opt)
        dcp.save({"model": model, "optim": optim, "step": self.step, "loader": self.loader.state_dict()},
                 checkpoint_id=path)

    def load(self, folder):
        path = sorted(p for p in Path(folder).iterdir() if p.is_dir())[-1]
        model, optim = get_state_dict(self.model, self.opt)
        state = {"model": model, "optim": optim, "step": 0, "loader": self.loader.state_dict()}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]
        self.loader.load_state_dict(state["loader"])

    def train(self):
        g = self.graph
        while self.step < self.args.steps:
            seeds = next(self.loader)
            loss = F.cross_entropy(self.model(g.x, g.neighbours, seeds), g.y[seeds])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            if self.step % 6 == 0:
                total = loss.detach().clone()
                dist.all_reduce(total)
                if self.rank == 0:
                    print(f"step {self.step} loss {total.item() / self.world:.4f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()

    @torch.no_grad()
    def accuracy(self, nodes):
        logits = self.model(self.graph.x, self.graph.neighbours, nodes)
        return (logits.argmax(-1) == self.graph.y[nodes]).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.train()
    train_acc = trainer.accuracy(trainer.graph.train_nodes)
    test_acc = trainer.accuracy(trainer.graph.test_nodes)
    if trainer.rank == 0:
        print(f"accuracy train {train_acc:.4f} test {test_acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
