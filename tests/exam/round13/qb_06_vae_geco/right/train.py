from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from geco import Geco
from model import AudioVAE
from saving import restore, save

parser = ArgumentParser(description="VAE of audio frames under a reconstruction constraint")
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--target", type=float, default=14.0)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--out", default="vae_out")
parser.add_argument("--resume")


def frames(step, n, frame=24, latent=6):
    g = torch.Generator().manual_seed(17 * step + 1)
    t = torch.arange(frame) / frame
    f = 1 + 2 * torch.rand(n, 1, generator=g)
    a = 0.8 + 0.8 * torch.rand(n, 1, generator=g)
    x = a * torch.sin(6.2832 * (f * t + torch.rand(n, 1, generator=g)))
    return x, torch.randn(n, latent, generator=g)


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = AudioVAE()
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    geco = Geco(args.target)
    begin = restore(args.resume, model, optimizer, geco) if args.resume else 0
    for step in range(begin, args.steps):
        x, eps = (v.chunk(world)[rank] for v in frames(step, args.batch))
        rec, kl = model(x, eps)
        loss = geco.loss(rec, kl)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        geco.update(rec)
        if (step + 1) % 7 == 0:
            shown = torch.stack([loss.detach(), rec.detach(), kl.detach()])
            dist.all_reduce(shown)
            if rank == 0:
                a, b, c = (shown / world).tolist()
                print(f"{step + 1:3d} loss {a:.4f} rec {b:.4f} kl {c:.4f} log lambda {geco.log_lambda:+.5f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, optimizer, geco)


if __name__ == "__main__":
    args = parser.parse_args()
    dist.init_process_group("gloo")
    run(args)
    dist.destroy_process_group()
