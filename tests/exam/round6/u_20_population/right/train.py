"""Population-based training: three sharded classifiers, the worst takes over the best now and then.
At the end the weights of the members are averaged, weighted by their validation likelihood."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from member import Member


def glyphs(n, gen):
    y = torch.randint(0, 5, (n,), generator=gen)
    protos = torch.randn(5, 12, 12, generator=torch.Generator().manual_seed(9))
    protos = F.avg_pool2d(protos[:, None], 3, 1, 1)
    return protos[y] + 0.4 * torch.randn(n, 1, 12, 12, generator=gen), y


class Population:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.members = [Member(i, lr) for i, lr in enumerate((0.003, 0.02, 0.06))]
        self.gen = torch.Generator().manual_seed(80)
        self.dice = random.Random(81)  # the same on every rank
        self.val = [t.chunk(world)[rank] for t in glyphs(80, torch.Generator().manual_seed(82))]
        self.step = 0

    @torch.no_grad()
    def scores(self):
        x, y = self.val
        out = torch.stack([F.cross_entropy(m.net(x), y, reduction="sum") for m in self.members])
        dist.all_reduce(out)
        return (out / 80).tolist()

    def train_step(self):
        x, y = (t.chunk(self.world)[self.rank] for t in glyphs(24, self.gen))
        losses = []
        for m in self.members:
            loss = F.cross_entropy(m.net(x), y)
            m.opt.zero_grad()
            loss.backward()
            m.opt.step()
            losses.append(loss.item())
        self.step += 1
        return losses

    def exploit(self):
        s = self.scores()
        best, worst = s.index(min(s)), s.index(max(s))
        self.members[worst].become(self.members[best], self.dice.choice((0.8, 1.25)))
        return best, worst

    def state(self):
        out = {"step": self.step, "gen": self.gen.get_state(), "dice": self.dice.getstate()}
        for m in self.members:
            net, opt = get_state_dict(m.net, m.opt)
            out[f"net{m.index}"], out[f"opt{m.index}"] = net, opt
        return out

    def load(self, folder):
        sd = self.state()
        dcp.load(sd, checkpoint_id=folder)
        for m in self.members:
            set_state_dict(m.net, m.opt, model_state_dict=sd[f"net{m.index}"], optim_state_dict=sd[f"opt{m.index}"])
        self.gen.set_state(sd["gen"])
        version, numbers, spare = sd["dice"]
        self.dice.setstate((version, tuple(numbers), spare))
        self.step = sd["step"]

    @torch.no_grad()
    def soup(self):
        w = torch.softmax(-4 * torch.tensor(self.scores()), 0).tolist()
        for ps in zip(*(m.net.parameters() for m in self.members)):
            ps[0].copy_(sum(wi * p for wi, p in zip(w, ps)))
        return w


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--exploit-every", type=int, default=4)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    pop = Population(dist.get_rank(), dist.get_world_size())
    if args.resume:
        pop.load(os.path.join(args.resume, max(os.listdir(args.resume), key=int)))
    while pop.step < args.steps:
        losses = pop.train_step()
        note = ""
        if pop.step % args.exploit_every == 0:
            note = "member {1} becomes {0}".format(*pop.exploit())
        if pop.rank == 0:
            print(f"step {pop.step}", " ".join(f"{v:.4f}" for v in losses), note, flush=True)
        if args.out and args.save_every and pop.step % args.save_every == 0:
            dcp.save(pop.state(), checkpoint_id=os.path.join(args.out, str(pop.step)))
    weights = pop.soup()
    final = pop.scores()[0]
    if pop.rank == 0:
        print("weights", [round(w, 4) for w in weights], f"soup validation {final:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
