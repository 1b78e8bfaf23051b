"""A GAN trained by one backward pass and one optimizer.

The discriminator sees generated images through a gradient reversal, so the same loss descends for the discriminator
and ascends for the generator; both are stepped at once.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

Z, SIDE, BATCH = 8, 8, 16


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class Generator(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.fc = nn.Linear(Z, w * 4)
        self.up = nn.ConvTranspose2d(w, w, 4, 2, 1)
        self.out = nn.ConvTranspose2d(w, 1, 4, 2, 1)

    def forward(self, z):
        h = F.leaky_relu(self.fc(z), 0.2).unflatten(1, (-1, 2, 2))
        return torch.tanh(self.out(F.leaky_relu(self.up(h), 0.2)))


class Critic(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.a = nn.Conv2d(1, w, 4, 2, 1)
        self.b = nn.Conv2d(w, w, 4, 2, 1)
        self.fc = nn.Linear(w * 4, 1)

    def forward(self, x):
        h = F.leaky_relu(self.b(F.leaky_relu(self.a(x), 0.2)), 0.2)
        return self.fc(h.flatten(1))


class Game(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.critic = Generator(), Critic()

    def forward(self, real, z, scale):
        fake = self.gen(z)
        score = self.critic(torch.cat([real, Reverse.apply(fake, scale)]))
        on_real, on_fake = score.chunk(2)
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        return loss + 0.01 * on_real.square().mean(), fake.detach().mean()


def batch(step):
    g = torch.Generator().manual_seed(step)
    yy, xx = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    c = torch.randint(2, 6, (BATCH, 2, 1, 1), generator=g)
    real = (((yy - c[:, 0]).abs() < 2) & ((xx - c[:, 1]).abs() < 2)).float() * 1.6 - 0.8
    return real.unsqueeze(1), torch.randn(BATCH, Z, generator=g)


def pack(module_params, opt):
    """Whole tensors on every rank: name -> (weight, Adam moments, Adam step)."""
    out = {}
    for name, p in module_params:
        s = opt.state[p]
        out[name] = [t.full_tensor() for t in (p.detach(), s["exp_avg"], s["exp_avg_sq"])] + [s["step"].clone()]
    return out


@torch.no_grad()
def unpack(blob, module_params, opt):
    world, rank = dist.get_world_size(), dist.get_rank()

    def fill(target, whole):
        local = target.to_local()
        pieces = whole.chunk(world)
        if local.numel():
            local.copy_(pieces[rank])

    for name, p in module_params:
        weight, m, v, step = blob[name]
        fill(p, weight)
        opt.state[p] = {"step": step.clone(), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        fill(opt.state[p]["exp_avg"], m)
        fill(opt.state[p]["exp_avg_sq"], v)


def main(argv):
    o = dict(zip(argv[::2], argv[1::2]))
    steps, save_at = int(o.get("-n", 24)), int(o.get("-save", 0))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    game = Game()
    fully_shard(game.gen)
    fully_shard(game.critic)
    fully_shard(game)
    opt = torch.optim.Adam([
        {"params": list(game.gen.parameters()), "lr": 1e-3},
        {"params": list(game.critic.parameters()), "lr": 2e-3},
    ], betas=(0.5, 0.95))
    named = list(game.named_parameters())
    first = 0
    if "-resume" in o:
        blob = torch.load(os.path.join(o["-resume"], "game.pt"))
        unpack(blob["state"], named, opt)
        first = blob["step"]

    for step in range(first, steps):
        real, z = (t[rank::world] for t in batch(step))
        loss, brightness = game(real, z, min(1.0, 0.1 + step / 20))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 6 == 5:
            line = torch.stack([loss.detach(), brightness])
            dist.all_reduce(line)
            if rank == 0:
                print(f"step {step + 1}: game value {line[0] / world:.5f}, mean of fakes {line[1] / world:+.4f}")
        if step + 1 == save_at:
            state = pack(named, opt)
            if rank == 0:
                torch.save({"state": state, "step": step + 1}, os.path.join(o["-out"], "game.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
