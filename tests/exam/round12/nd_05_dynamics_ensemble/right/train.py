import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from ensemble import DynamicsEnsemble
from plant import Plant


class Trainer:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.plant = Plant()
        with torch.device("meta"):
            self.model = DynamicsEnsemble(args.members, self.plant.state + self.plant.act, args.hidden, self.plant.state)
        fully_shard(self.model)
        self.model.to_empty(device="cpu")
        self.model.init_members(args.seed, self.rank)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, eps=1e-6)
        self.step = 0

    def state(self):
        return {"model": get_model_state_dict(self.model), "opt": get_optimizer_state_dict(self.model, self.opt), "step": self.step}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"ens{self.step:05d}"))

    def load(self, root):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(root, sorted(os.listdir(root))[-1]))
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.opt, state["opt"])
        self.step = state["step"]

    def update(self):
        x, y = self.plant.transitions(1000 + self.step, self.args.batch)
        x, y = x.chunk(self.world)[self.rank], y.chunk(self.world)[self.rank]
        loss = (self.model(x) - y).pow(2).mean()
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.step += 1
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / self.world

    @torch.no_grad()
    def disagreement(self):
        """Epistemic uncertainty: spread of the members, inside and outside of the visited region."""
        return [self.model(self.plant.transitions(5, 128, scale)[0]).std(0).mean().item() for scale in (1.0, 4.0)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--members", type=int, default=4)
    ap.add_argument("--hidden", type=int, default=32)
    ap.add_argument("--seed", type=int, default=100)
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/ensemble")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    while trainer.step < args.steps:
        loss = trainer.update()
        if trainer.rank == 0 and trainer.step % 5 == 1:
            print(f"{trainer.step:4d}  loss {loss:.5f}", flush=True)
        if args.save_every and trainer.step % args.save_every == 0 and trainer.step < args.steps:
            trainer.save()
    inside, outside = trainer.disagreement()
    if trainer.rank == 0:
        print(f"loss {loss:.5f}  spread inside {inside:.5f}  outside {outside:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
