import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diffusion import Denoiser, noisy_batch
from ema import ShardedEMA


class RunState:
    """Everything a checkpoint holds."""

    def __init__(self, model, opt, ema, gen):
        self.model, self.opt, self.ema, self.gen, self.step = model, opt, ema, gen, 0

    def tensors(self):
        return {
            "model": self.model.state_dict(),
            "optim": get_optimizer_state_dict(self.model, self.opt),
            "ema": self.ema.shadow,
            "gen": self.gen.get_state(),
            "step": torch.tensor(self.step),
        }

    def save(self, root):
        dcp.save(self.tensors(), checkpoint_id=os.path.join(root, f"iter{self.step:07d}"))

    def load(self, root):
        newest = sorted(d for d in os.listdir(root) if os.path.exists(os.path.join(root, d, ".metadata")))[-1]
        state = self.tensors()
        dcp.load(state, checkpoint_id=os.path.join(root, newest))
        set_optimizer_state_dict(self.model, self.opt, state["optim"])
        self.gen.set_state(state["gen"])
        self.step = int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=90)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(21)
    model = Denoiser()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), eps=1e-6)
    ema = ShardedEMA(model)
    gen = torch.Generator().manual_seed(22)
    run = RunState(model, opt, ema, gen)
    if args.resume:
        run.load(args.resume)

    while run.step < args.steps:
        x, t, eps = (v.chunk(world)[rank] for v in noisy_batch(args.batch, gen))
        loss = F.mse_loss(model(x, t), eps)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update()
        run.step += 1
        if run.step % 15 == 0:
            dist.all_reduce(mean := loss.detach().clone())
            if rank == 0:
                print(f"step {run.step} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            run.save(args.out)

    averaged = ema.full()
    latest = {n: p.full_tensor() for n, p in ema.params.items()}
    if rank == 0:
        x, t, eps = noisy_batch(4000, torch.Generator().manual_seed(23))
        plain = Denoiser()
        for name, weights in (("latest", latest), ("averaged", averaged)):
            plain.load_state_dict(weights)
            with torch.no_grad():
                print(f"{name} weights: test loss {F.mse_loss(plain(x, t), eps).item():.4f}", flush=True)
        if args.out:
            torch.save(averaged, os.path.join(args.out, "ema_weights.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
