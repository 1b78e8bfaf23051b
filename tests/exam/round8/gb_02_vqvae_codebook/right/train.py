import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from vq import VQVAE

BATCH, SIZE = 16, 16


def stripes(step, n=BATCH):
    g = torch.Generator().manual_seed(77 + step)
    angle = torch.rand(n, 1, 1, generator=g) * math.pi
    freq = 1 + 3 * torch.rand(n, 1, 1, generator=g)
    level = torch.rand(n, 1, 1, generator=g)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
    img = level * torch.sin(freq * math.pi * (xx * angle.cos() + yy * angle.sin()))
    return (img + 0.02 * torch.randn(n, SIZE, SIZE, generator=g)).unsqueeze(1)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.model = VQVAE()
        fully_shard(self.model.encoder)
        fully_shard(self.model.decoder)
        fully_shard(self.model)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=4e-3)
        self.step = 0

    def save(self):
        model_sd, opt_sd = get_state_dict(self.model, self.opt)
        dcp.save({"model": model_sd, "optim": opt_sd, "step": self.step},
                 checkpoint_id=str(Path(self.args.out) / f"{self.step:06d}"))

    def restore(self, root):
        newest = max(p for p in Path(root).iterdir() if (p / ".metadata").exists())
        model_sd, opt_sd = get_state_dict(self.model, self.opt)
        state = {"model": model_sd, "optim": opt_sd, "step": 0}
        dcp.load(state, checkpoint_id=str(newest))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]

    def mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def fit(self):
        per = BATCH // self.world
        while self.step < self.args.steps:
            x = stripes(self.step)[self.rank * per:(self.rank + 1) * per]
            recon, commit, _ = self.model(x)
            rec_loss = F.mse_loss(recon, x)
            (rec_loss + 0.25 * commit).backward()
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            rec = self.mean(rec_loss)
            if self.rank == 0 and self.step % 5 == 0:
                print(f"step {self.step} recon {rec:.6f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        x = stripes(10_000)
        per = BATCH // self.world
        x = x[self.rank * per:(self.rank + 1) * per]
        recon, _, idx = self.model(x)
        used = torch.zeros(len(self.model.quantizer.codebook))
        used[idx.unique()] = 1
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        mse = self.mean(F.mse_loss(recon, x))
        if self.rank == 0:
            print(f"test recon {mse:.6f} codes used {int(used.sum())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="runs")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.restore(args.resume)
    trainer.fit()
    trainer.evaluate()
    dist.destroy_process_group()
