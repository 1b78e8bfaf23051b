"""Train a Bradley-Terry reward model with a soft prompt; prompt and score head stay replicated on every rank."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from gradients import average_replicated, clip_gradients
from model import RewardModel

VOCAB, LENGTH = 40, 12


def comparisons(step, batch):
    """The better answer of a pair holds more tokens of the upper half of the vocabulary."""
    g = torch.Generator().manual_seed(40 + step)
    a, b = torch.randint(0, VOCAB, (2, batch, LENGTH), generator=g)
    a_wins = (a >= VOCAB // 2).sum(1) >= (b >= VOCAB // 2).sum(1)
    better = torch.where(a_wins[:, None], a, b)
    worse = torch.where(a_wins[:, None], b, a)
    return better, worse


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(13)
        self.model = RewardModel(VOCAB, length=LENGTH)
        for layer in self.model.layers:
            fully_shard(layer)
        # the prompt and the one-row score head are too small to be worth sharding
        replicated = {self.model.soft_prompt, self.model.score.weight}
        fully_shard(self.model, ignored_params=replicated)
        self.replicated = [p for p in self.model.parameters() if p in replicated]
        self.sharded = [p for p in self.model.parameters() if p not in replicated]
        self.opt = torch.optim.SGD([
            {"params": self.sharded, "lr": args.lr},
            {"params": self.replicated, "lr": 2 * args.lr},
        ], lr=args.lr, momentum=0.9)
        self.step = 0

    def state(self):
        return {"step": self.step, "model": self.model.state_dict(), "opt": self.opt.state_dict()}

    def save(self):
        folder = Path(self.args.out) / f"step{self.step:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state(), folder / f"{self.rank}.pt")

    def load(self, root):
        folder = sorted(Path(root).glob("step*"))[-1]
        state = torch.load(folder / f"{self.rank}.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.step = state["step"]

    def run(self):
        args = self.args
        while self.step < args.steps:
            better, worse = (t[self.rank::self.world] for t in comparisons(self.step, args.batch))
            scores = self.model(torch.cat([better, worse])).squeeze(-1)
            loss = -F.logsigmoid(scores[: len(better)] - scores[len(better):]).mean()
            self.opt.zero_grad()
            loss.backward()
            average_replicated(self.replicated)
            norm = clip_gradients(self.sharded, self.replicated, args.max_norm)
            self.opt.step()
            self.step += 1
            mean = loss.detach() / self.world
            dist.all_reduce(mean)
            if self.rank == 0:
                print(f"step {self.step} loss {mean.item():.4f} grad norm {norm:.4f}", flush=True)
            if args.save_every and self.step % args.save_every == 0:
                self.save()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--max-norm", type=float, default=0.1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
