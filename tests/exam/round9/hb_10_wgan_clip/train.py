"""WGAN with weight clipping: n critic updates (RMSprop) for each generator update."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from nets import critic, generator
from shadow import Shadow, local


def real_images(n, gen):
    """4x4 colour patches with a common gradient direction."""
    c = torch.rand(n, 3, 1, 1, generator=gen) - 0.5
    s = torch.rand(n, 1, 1, 1, generator=gen)
    ramp = torch.linspace(-0.5, 0.5, 4).view(1, 1, 1, 4)
    return (c + s * ramp).expand(n, 3, 4, 4).reshape(n, 48)


def shard(net):
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(net, reshard_after_forward=True)
    return net


def critic_updates(cfg, G, C, opt, gen):
    """Endless stream of critic updates; yields the Wasserstein estimate after each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    while True:
        x = real_images(cfg.batch, gen)[rank::world]
        z = torch.randn(cfg.batch, 8, generator=gen)[rank::world]
        with torch.no_grad():
            fake = G(z)
        gap = C(x).mean() - C(fake).mean()
        opt.zero_grad()
        (-gap).backward()
        opt.step()
        with torch.no_grad():
            for p in C.parameters():
                local(p).clamp_(-cfg.clip, cfg.clip)
        yield gap.detach()


def pack(G, C, opt_g, opt_c, shadow, gen, it):
    return {
        "G": [local(p).detach() for p in G.parameters()],
        "C": [local(p).detach() for p in C.parameters()],
        "sq_g": [local(opt_g.state[p]["square_avg"]) for p in G.parameters()],
        "sq_c": [local(opt_c.state[p]["square_avg"]) for p in C.parameters()],
        "shadow": shadow.shards,
        "updates": shadow.updates,
        "gen": gen.get_state(),
        "it": it,
    }


@torch.no_grad()
def unpack(blob, G, C, opt_g, opt_c, shadow, gen):
    for net, opt, w, sq in ((G, opt_g, "G", "sq_g"), (C, opt_c, "C", "sq_c")):
        for p, v, s in zip(net.parameters(), blob[w], blob[sq]):
            local(p).copy_(v)
            buf = torch.zeros_like(p)
            local(buf).copy_(s)
            opt.state[p] = {"step": torch.zeros(()), "square_avg": buf}
    for s, v in zip(shadow.shards, blob["shadow"]):
        s.copy_(v)
    shadow.updates = blob["updates"]
    gen.set_state(blob["gen"])
    return blob["it"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=16)
    ap.add_argument("--n-critic", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--clip", type=float, default=0.05)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="wgan")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    cfg = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(14)
    G, C = shard(generator()), shard(critic())
    opt_g = torch.optim.RMSprop(G.parameters(), lr=cfg.lr)
    opt_c = torch.optim.RMSprop(C.parameters(), lr=cfg.lr)
    shadow = Shadow(G, 0.9)
    gen = torch.Generator().manual_seed(15)
    it = 0
    if cfg.resume:
        last = max(os.listdir(cfg.resume), key=lambda n: int(n[2:]))
        it = unpack(torch.load(os.path.join(cfg.resume, last, f"{rank}.pt")), G, C, opt_g, opt_c, shadow, gen)

    stream = critic_updates(cfg, G, C, opt_c, gen)
    while it < cfg.iters:
        for _ in range(cfg.n_critic):
            gap = next(stream)
        z = torch.randn(cfg.batch, 8, generator=gen)[rank::world]
        # the gradients that this leaves in the critic are dropped before its next update
        loss = -C(G(z)).mean()
        opt_g.zero_grad()
        loss.backward()
        opt_g.step()
        shadow.update()
        it += 1
        if it % 4 == 0:
            with shadow, torch.no_grad():
                fake = G(torch.randn(256, 8, generator=torch.Generator().manual_seed(1)))
            ref = real_images(256, torch.Generator().manual_seed(2))
            err = (fake.mean(0) - ref.mean(0)).pow(2).mean() + (fake.std(0) - ref.std(0)).pow(2).mean()
            dist.all_reduce(gap)
            if rank == 0:
                print(f"it {it} wasserstein {gap / world:.5f} moment error of the average {err:.5f}")
        if cfg.save_every and it % cfg.save_every == 0:
            os.makedirs(f"{cfg.out}/it{it}", exist_ok=True)
            torch.save(pack(G, C, opt_g, opt_c, shadow, gen, it), f"{cfg.out}/it{it}/{rank}.pt")
            dist.barrier()

    if cfg.export:
        full = StateDictOptions(full_state_dict=True)
        live = get_model_state_dict(G, options=full)
        with shadow:
            avg = {k: v.clone() for k, v in get_model_state_dict(G, options=full).items()}
        if rank == 0:
            torch.save({"live": live, "average": avg}, cfg.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
