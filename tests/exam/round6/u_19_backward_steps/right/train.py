"""Sound denoising by an autoencoder whose two halves are trained in turns of three steps. There is no optimizer.step():
the updates happen in hooks during backward, and the half that is not on turn is frozen."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from fused import BackwardAdam


class Half(nn.Module):
    def __init__(self, a, b, c):
        super().__init__()
        self.one, self.two = nn.Linear(a, b), nn.Linear(b, c)

    def forward(self, x):
        return self.two(F.silu(self.one(x)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Half(40, 32, 10), Half(10, 32, 40)
        self.gain = nn.Parameter(torch.ones(()).reshape(1))

    def forward(self, x):
        return self.gain * self.decoder(self.encoder(x))


def sounds(n, gen):
    t = torch.arange(40) * 0.2
    clean = torch.sin(t * (1 + 2 * torch.rand(n, 1, generator=gen)) + 6.28 * torch.rand(n, 1, generator=gen))
    return clean, clean + 0.4 * torch.randn(n, 40, generator=gen)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(61)
    model = Denoiser()
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    adam = BackwardAdam(model.named_parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(62)
    done = 0
    if args.resume:
        done = max(int(d) for d in os.listdir(args.resume))
        sd = torch.load(os.path.join(args.resume, str(done), f"{rank}.pt"))
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.to_local().copy_(sd["weights"][n])
        adam.load_state_dict(sd["adam"])
        gen.set_state(sd["gen"])

    while done < args.steps:
        turn = (done // 3) % 2
        model.encoder.requires_grad_(turn == 0)
        model.decoder.requires_grad_(turn == 1)
        adam.lr = 3e-3 * (1 - 0.8 * done / args.steps)
        clean, noisy = (t.chunk(world)[rank] for t in sounds(32, gen))
        loss = F.mse_loss(model(noisy), clean)
        loss.backward()
        done += 1
        if rank == 0:
            print(f"step {done} training {('encoder', 'decoder')[turn]} loss {loss.item():.5f}", flush=True)
        if args.out and args.save_every and done % args.save_every == 0:
            folder = os.path.join(args.out, str(done))
            os.makedirs(folder, exist_ok=True)
            torch.save({"weights": {n: p.detach().to_local() for n, p in model.named_parameters()},
                        "adam": adam.state_dict(), "gen": gen.get_state()}, os.path.join(folder, f"{rank}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
