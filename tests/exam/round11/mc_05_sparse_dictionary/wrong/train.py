import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from atoms import normalize_atoms
from data import make_telemetry
from sae import SparseAutoencoder


class AppState(Stateful):
    def __init__(self, model, opt):
        self.model, self.opt, self.step = model, opt, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "step": self.step}

    def load_state_dict(self, s):
        set_state_dict(self.model, self.opt, model_state_dict=s["model"], optim_state_dict=s["opt"])
        self.step = s["step"]


@torch.no_grad()
def auc(model, normal, broken):
    """Every rank scores the same rows, so the ranks agree without communication."""
    good = (model(normal)[0] - normal).square().sum(-1)
    bad = (model(broken)[0] - broken).square().sum(-1)
    return (bad[:, None] > good[None, :]).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=21)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--l1", type=float, default=0.02)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, broken = make_telemetry()
    train, holdout = x[:768], x[768:]
    torch.manual_seed(1)
    model = SparseAutoencoder()
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    app = AppState(model, opt)
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[1]))
        dcp.load({"app": app}, checkpoint_id=os.path.join(args.resume, newest))

    per_epoch = len(train) // args.batch
    while app.step < args.steps:
        epoch, pos = divmod(app.step, per_epoch)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        rows = order[pos * args.batch:(pos + 1) * args.batch]
        xb = train[rows[rank::world]]
        recon, code = model(xb)
        mse = (recon - xb).square().sum(-1).mean()
        loss = mse + args.l1 * code.abs().sum(-1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        normalize_atoms(model.decoder)
        app.step += 1

        if app.step % 7 == 0:
            t = torch.stack([loss.detach(), mse.detach()])
            dist.all_reduce(t)
            score = auc(model, holdout, broken)
            if rank == 0:
                print(f"step {app.step} loss {t[0] / world:.5f} mse {t[1] / world:.5f} auc {score:.4f}")
        if args.save_every and app.step % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"step-{app.step}"))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
