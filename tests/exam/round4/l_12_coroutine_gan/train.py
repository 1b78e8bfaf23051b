"""A GAN played by two coroutines under FSDP2; the critic has two turns for each turn of the artist."""
import argparse
import itertools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import store
from nets import Net
from players import artist, critic, start


def ring(n, g):
    a = torch.randint(0, 8, (n,), generator=g) * (2 * torch.pi / 8)
    return torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--turns", type=int, default=36)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="turns")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(33)
    gen, disc = Net(6, 2), Net(2, 1)
    for net in (gen, disc):
        fully_shard([net.a, net.b])
        fully_shard(net, reshard_after_forward=True)
    og = torch.optim.Adam(gen.parameters(), lr=3e-3, betas=(0.0, 0.99))
    od = torch.optim.Adam(disc.parameters(), lr=3e-3, betas=(0.0, 0.99))

    def source(turn, salt):
        g = torch.Generator().manual_seed(turn * 2 + salt)
        return ring(args.batch, g)[rank::world], torch.randn(args.batch, 6, generator=g)[rank::world]

    first = store.load(args.resume, [gen, disc], [og, od]) if args.resume else 0
    order = itertools.islice(itertools.cycle([("critic", 0), ("critic", 0), ("artist", 1)]), first % 3, None)
    players = [start(critic(disc, gen, od, source)), start(artist(gen, disc, og, source))]
    for turn, (name, who) in zip(range(first, args.turns), order):
        loss = players[who].send(turn) / world
        dist.all_reduce(loss)
        if rank == 0 and turn % 5 < 2:
            print(f"turn {turn} {name} loss {loss.item():.4f}", flush=True)
        if args.save_every and (turn + 1) % args.save_every == 0:
            store.save(args.out, turn + 1, [gen, disc], [og, od])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
