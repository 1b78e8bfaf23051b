"""Wasserstein GAN with weight clipping: critic and generator are two FSDP models with an optimizer each,
three critic updates per generator update; the generator's moving average is what gets exported."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from nets import sharded_mlp

Z, X = 8, 12


def real_data(n, gen):
    z = torch.randn(n, 3, generator=gen)
    basis = torch.randn(3, X, generator=torch.Generator().manual_seed(4))
    return torch.tanh(z @ basis) + 0.05 * torch.randn(n, X, generator=gen)


def pack(models, opts, ema, rng, rounds):
    state = {"ema": ema, "rng": rng.get_state(), "rounds": rounds}
    for name in models:
        state[name], state[name + "_opt"] = get_state_dict(models[name], opts[name])
    return state


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=14)
    ap.add_argument("--critic-steps", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    models = {"gen": sharded_mlp([Z, 32, 32, X]), "critic": sharded_mlp([X, 32, 32, 1])}
    opts = {n: torch.optim.RMSprop(m.parameters(), lr=2e-3, eps=1e-5) for n, m in models.items()}
    gen, critic = models["gen"], models["critic"]
    ema = {n: p.detach().clone() for n, p in gen.named_parameters()}
    rng = torch.Generator().manual_seed(60)  # same on all ranks: draws the global batch
    done = 0

    if args.resume:
        last = max(int(d[1:]) for d in os.listdir(args.resume) if d.startswith("r"))
        state = pack(models, opts, ema, rng, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"r{last}"))
        for n in models:
            set_state_dict(models[n], opts[n], model_state_dict=state[n], optim_state_dict=state[n + "_opt"])
        ema = state["ema"]
        rng.set_state(state["rng"])
        done = state["rounds"]

    def mine(t):
        return t.chunk(world)[rank]

    while done < args.rounds:
        for _ in range(args.critic_steps):
            real = mine(real_data(args.batch, rng))
            z = mine(torch.randn(args.batch, Z, generator=rng))
            with torch.no_grad():
                fake = gen(z)
            scores = critic(torch.cat([real, fake]))
            gap = scores[: len(real)].mean() - scores[len(real):].mean()
            opts["critic"].zero_grad()
            (-gap).backward()
            opts["critic"].step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.to_local().clamp_(-0.15, 0.15)

        z = mine(torch.randn(args.batch, Z, generator=rng))
        critic.requires_grad_(False)
        loss = -critic(gen(z)).mean()
        opts["gen"].zero_grad()
        loss.backward()
        critic.requires_grad_(True)
        opts["gen"].step()
        with torch.no_grad():
            for n, p in gen.named_parameters():
                ema[n].lerp_(p, 0.1)
        done += 1

        stats = torch.stack([gap.detach(), loss.detach()]) / world
        dist.all_reduce(stats)
        if rank == 0 and done % 2 == 0:
            print(f"round {done} wasserstein {stats[0]:.4f} generator {stats[1]:.4f}")
        if args.save_every and done % args.save_every == 0:
            dcp.save(pack(models, opts, ema, rng, done), checkpoint_id=os.path.join(args.out, f"r{done}"))

    if args.export:
        out = {"ema." + n: t.full_tensor() for n, t in ema.items()}
        out |= {f"{m}.{n}": p.detach().full_tensor() for m in models for n, p in models[m].named_parameters()}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
