import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from vq import VQVAE


def glyphs(n, size=12):
    """Black-and-white images of random strokes."""
    g = torch.Generator().manual_seed(31)
    x = -torch.ones(n, 1, size, size)
    for i in range(n):
        for _ in range(3):
            r, c = torch.randint(size, (2,), generator=g).tolist()
            if torch.rand((), generator=g) < 0.5:
                x[i, 0, r, min(c, 4):] = 1
            else:
                x[i, 0, :max(r, 7), c] = 1
    return x + 0.02 * torch.randn(x.shape, generator=g)


class App(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.step = 0
        self.revived = 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.optimizer)
        return {"model": m, "optimizer": o, "step": self.step, "revived": self.revived}

    def load_state_dict(self, s):
        set_state_dict(self.model, self.optimizer, model_state_dict=s["model"], optim_state_dict=s["optimizer"])
        self.step, self.revived = s["step"], s["revived"]


def reconstruction_error(model, images):
    """Mean squared error over held-out images, split over the ranks."""
    model.eval()
    part = images.chunk(dist.get_world_size())[dist.get_rank()]
    with torch.no_grad():
        out, _ = model(part)
        total = torch.stack([((out - part) ** 2).double().sum(), torch.tensor(float(part.numel()), dtype=torch.float64)])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--root", default="vqvae")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    model = VQVAE()
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
    app = App(model, optimizer)
    if args.resume:
        newest = max((d for d in os.listdir(args.root) if d.isdigit()), key=int)
        dcp.load({"app": app}, checkpoint_id=os.path.join(args.root, newest))

    images = glyphs(320)
    train, held_out = images[:288], images[288:]
    per_epoch = len(train) // args.batch
    while app.step < args.steps:
        epoch, k = divmod(app.step, per_epoch)
        perm = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        x = train[perm[k * args.batch:(k + 1) * args.batch].chunk(world)[rank]]
        recon, commit = model(x)
        loss = F.mse_loss(recon, x) + commit
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        app.revived += model.codebook.update()
        app.step += 1
        if app.step % 5 == 0:
            err = reconstruction_error(model, held_out)
            if rank == 0:
                print(f"step {app.step} held-out mse {err:.5f} revived codes {app.revived}")
        if args.save_every and app.step % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.root, str(app.step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
