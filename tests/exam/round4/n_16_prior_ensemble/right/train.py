"""Bootstrapped ensemble with random priors. In every step each member takes one step of its own, on its own batch."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from boot import make, poisson_weights
from member import Ensemble


class Run:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.x, self.y = make()
        self.w = poisson_weights(len(self.x), args.members)
        self.ens = Ensemble(args.members, init_device_mesh("cpu", (self.world,)))
        self.opts = [torch.optim.RMSprop(m.net.parameters(), lr=0.005 * (1 + 0.2 * i)) for i, m in enumerate(self.ens.members)]
        self.step = 0

    def state(self):
        return {"nets": {f"m{i}": m.net.state_dict() for i, m in enumerate(self.ens.members)},
                "opts": {f"m{i}": get_optimizer_state_dict(m.net, o) for i, (m, o) in enumerate(zip(self.ens.members, self.opts))},
                "step": self.step}

    def restore(self, folder):
        sd = self.state()
        dcp.load(sd, checkpoint_id=max(folder.iterdir()))
        for i, (m, o) in enumerate(zip(self.ens.members, self.opts)):
            m.net.load_state_dict(sd["nets"][f"m{i}"])
            set_optimizer_state_dict(m.net, o, sd["opts"][f"m{i}"])
        self.step = sd["step"]

    def member_loss(self, i):
        g = torch.Generator().manual_seed(self.step * 100 + i)
        batch = torch.randperm(len(self.x), generator=g)[:self.args.batch]
        total = self.w[i, batch].sum()  # of the whole batch, known to all ranks
        mine = batch.chunk(self.world)[self.rank]
        err = (self.ens.members[i](self.x[mine]) - self.y[mine]).pow(2)
        return (self.w[i, mine] * err).sum() * self.world / total

    def tick(self):
        shown = torch.zeros(len(self.opts))
        # interleaved: all backwards first, then all steps; no member touches the other's weights
        for i in range(len(self.opts)):
            loss = self.member_loss(i)
            loss.backward()
            shown[i] = loss.detach()
        for opt in self.opts:
            opt.step()
            opt.zero_grad()
        self.step += 1
        dist.all_reduce(shown)
        return shown / self.world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--members", type=int, default=3)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/ens"))
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.restore(args.resume)
    while run.step < args.steps:
        losses = run.tick()
        if run.rank == 0 and run.step % 5 == 0:
            print(f"step {run.step} " + " ".join(f"{v:.4f}" for v in losses.tolist()), flush=True)
        if args.save_every and run.step % args.save_every == 0:
            dcp.save(run.state(), checkpoint_id=args.out / f"e{run.step:05d}")
    if args.export:
        full = {n: p.full_tensor() for n, p in run.ens.trainable().items()}
        if run.rank == 0:
            torch.save(full, args.export)
    with torch.no_grad():
        probe = torch.tensor([[0.6, 1.0], [-0.5, 1.0]])
        spread = torch.stack([m(probe) for m in run.ens.members]).std(0)
    if run.rank == 0:
        print(f"spread in the gap {spread[0]:.3f}, in the data {spread[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
