import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from moe import MultiSkill
from parallel import average_gradients, replicated_parameters, shard

SKILLS, OBS, ACT = 4, 12, 3


def batch(step, n, rank, world):
    """Demonstrations are logged skill by skill, so neighbours in a batch belong together."""
    g = torch.Generator().manual_seed(50 + step)
    skill = torch.arange(n) * SKILLS // n
    x = torch.randn(n, OBS, generator=g)
    x[:, :SKILLS] = 2.0 * F.one_hot(skill, SKILLS)
    w = torch.randn(SKILLS, OBS, ACT, generator=torch.Generator().manual_seed(7))
    y = torch.tanh(torch.einsum("no,noa->na", x, w[skill]) / 2)
    part = slice(rank * n // world, (rank + 1) * n // world)
    return x[part], y[part]


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = shard(MultiSkill(OBS, 24, ACT, SKILLS, 2))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.replicated = replicated_parameters(self.model)
        self.step = 0

    def state(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "optim": o, "step": torch.tensor(self.step)}

    def save(self):
        dcp.save(self.state(), checkpoint_id=pathlib.Path(self.args.out) / f"step{self.step:04d}")

    def load(self, folder):
        s = self.state()
        dcp.load(s, checkpoint_id=max(pathlib.Path(folder).glob("step*")))
        set_state_dict(self.model, self.opt, model_state_dict=s["model"], optim_state_dict=s["optim"])
        self.step = int(s["step"])

    def fit(self):
        while self.step < self.args.steps:
            x, y = batch(self.step, self.args.batch, self.rank, self.world)
            loss = F.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            average_gradients(self.replicated)
            self.opt.step()
            self.step += 1
            mean = loss.detach() / self.world
            dist.all_reduce(mean)
            if self.rank == 0 and self.step % 3 == 1:
                print(f"step {self.step} imitation loss {mean.item():.5f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=13)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=2)
    p.add_argument("--out", default=".")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit()
    dist.destroy_process_group()
