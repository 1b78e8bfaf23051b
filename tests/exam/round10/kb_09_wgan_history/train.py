"""Wasserstein GAN with weight clipping, several critic steps per generator step and a fake-image history."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from history import ImageHistory
from models import Critic, Generator

Z, SIZE, BATCH, CLIP = 12, 8, 24, 0.05
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def real_images(n, g):
    top, bottom = torch.rand(2, n, 3, 1, 1, generator=g) * 1.6 - 0.8
    ramp = torch.linspace(0, 1, SIZE)[None, None, :, None]
    image = top * (1 - ramp) + bottom * ramp
    return image.expand(n, 3, SIZE, SIZE) + 0.05 * torch.randn(n, 3, SIZE, SIZE, generator=g)


def rows(t):
    return t.chunk(dist.get_world_size())[dist.get_rank()]


class critic_frozen:
    """The generator step needs the gradient through the critic, but not of its weights."""

    def __init__(self, critic):
        self.critic = critic

    def __enter__(self):
        self.critic.requires_grad_(False)

    def __exit__(self, *exc):
        self.critic.requires_grad_(True)


@torch.no_grad()
def clip_weights(critic):
    for p in critic.parameters():
        p.to_local().clamp_(-CLIP, CLIP)


@torch.no_grad()
def mean_over_ranks(t):
    t = t.detach().clone()
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gen-steps", type=int, default=14)
    ap.add_argument("--critic-steps", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--save-dir", default="wgan")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")

    torch.manual_seed(5)
    gen, critic = Generator(Z), Critic()
    fully_shard(gen.body)
    fully_shard(gen)
    fully_shard(critic.body)
    fully_shard(critic)
    clip_weights(critic)
    opt_g = torch.optim.RMSprop(gen.parameters(), lr=5e-4, eps=1e-5)
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3, eps=1e-5)
    pool = ImageHistory(60, (3, SIZE, SIZE), seed=6)
    data = torch.Generator().manual_seed(7)
    nets = {"gen": (gen, opt_g), "critic": (critic, opt_c)}
    it = 0

    if args.resume:
        path = os.path.join(args.resume, max(os.listdir(args.resume), key=lambda f: int(f.split(".")[0][5:])))
        state = torch.load(path, weights_only=True)
        for k, (net, opt) in nets.items():
            set_model_state_dict(net, state[k]["net"], options=FULL)
            set_optimizer_state_dict(net, opt, state[k]["opt"], options=FULL)
        pool.load_state_dict(state["pool"])
        data.set_state(state["data"])
        it = state["it"]

    for it in range(it + 1, args.gen_steps + 1):
        for _ in range(args.critic_steps):
            real = rows(real_images(BATCH, data))
            with torch.no_grad():
                fake = gen(rows(torch.randn(BATCH, Z, generator=data)))
            fake = pool.exchange(fake)
            scores = critic(torch.cat([real, fake]))
            loss_c = scores[len(real):].mean() - scores[:len(real)].mean()
            loss_c.backward()
            opt_c.step()
            opt_c.zero_grad()
            clip_weights(critic)
        with critic_frozen(critic):
            loss_g = -critic(gen(rows(torch.randn(BATCH, Z, generator=data)))).mean()
            loss_g.backward()
        opt_g.step()
        opt_g.zero_grad()
        w, lg = mean_over_ranks(-loss_c), mean_over_ranks(loss_g)
        if dist.get_rank() == 0:
            print(f"it {it} wasserstein {w:.5f} gen {lg:.5f}")

        if args.save_every and it % args.save_every == 0:
            state = {k: {"net": get_model_state_dict(net, options=FULL),
                         "opt": get_optimizer_state_dict(net, opt, options=FULL)} for k, (net, opt) in nets.items()}
            state.update(pool=pool.state_dict(), data=data.get_state(), it=it)
            if dist.get_rank() == 0:
                os.makedirs(args.save_dir, exist_ok=True)
                torch.save(state, os.path.join(args.save_dir, f"state{it}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
