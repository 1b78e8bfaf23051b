"""WGAN with weight clipping: a critic that is trained several times per generator update."""
import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from nets import Critic, Generator
from stream import NoiseAndImages


def critic_phase(gen, critic, opt, stream, n_critic, clip):
    """A generator function: gives the estimate of the Wasserstein distance after every update of the critic."""
    for real, z in islice(stream, n_critic):
        with torch.no_grad():
            fake = gen(z)
        # one forward for both halves, so the critic's parameters are gathered once
        score = critic(torch.cat([real, fake]))
        distance = score[: len(real)].mean() - score[len(real):].mean()
        opt.zero_grad()
        (-distance).backward()
        opt.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-clip, clip)
        yield distance.detach()


def generator_phase(gen, critic, opt, stream):
    loss = -critic(gen(stream.codes())).mean()
    opt.zero_grad()
    loss.backward()  # also leaves gradients in the critic; they are cleared before its next update
    opt.step()
    return loss.detach()


def app_state(gen, critic, opt_g, opt_c):
    gm, go = get_state_dict(gen, opt_g)
    cm, co = get_state_dict(critic, opt_c)
    return {"gen": gm, "gen_opt": go, "critic": cm, "critic_opt": co}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=14)
    p.add_argument("--warm-rounds", type=int, default=2, help="rounds with a longer critic phase")
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--clip", type=float, default=0.1)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    gen, critic = Generator(), Critic()
    for layer in (critic.c1, critic.c2):
        fully_shard(layer)
    fully_shard(gen)
    fully_shard(critic)
    opt_g = torch.optim.RMSprop(gen.parameters(), lr=2e-3)
    # biases of units that see both halves alike have no gradient; eps keeps their rounding noise small
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=2e-3, eps=1e-4)
    stream = NoiseAndImages(args.batch, 8, rank, world, seed=99)

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d[5:]))
        state = app_state(gen, critic, opt_g, opt_c)
        state |= {"stream": stream.state_dict(), "round": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(gen, opt_g, model_state_dict=state["gen"], optim_state_dict=state["gen_opt"])
        set_state_dict(critic, opt_c, model_state_dict=state["critic"], optim_state_dict=state["critic_opt"])
        stream.load_state_dict(state["stream"])
        start = state["round"]

    for r in range(start, args.rounds):
        n_critic = 5 if r < args.warm_rounds else 2
        distances = list(critic_phase(gen, critic, opt_c, stream, n_critic, args.clip))
        g_loss = generator_phase(gen, critic, opt_g, stream)
        log = torch.stack([distances[-1], g_loss])
        dist.all_reduce(log)
        if rank == 0:
            print(f"round {r + 1:3d} distance {log[0].item() / world:.6f} gen {log[1].item() / world:.6f}")
        if args.save_every and (r + 1) % args.save_every == 0:
            state = app_state(gen, critic, opt_g, opt_c)
            dcp.save(state | {"stream": stream.state_dict(), "round": r + 1}, checkpoint_id=f"{args.out}/round{r + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
