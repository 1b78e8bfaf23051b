"""Replaced-token detection: a generator fills masked places, a discriminator finds the replaced tokens.
Two FSDP models with two optimizers; the generator is trained every step, the discriminator after a short delay."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from data import LENGTH, MASK, VOCAB, masks, sequences, uniforms
from keeper import Keeper
from nets import Net


def build(mesh, seed, **shape):
    torch.manual_seed(seed)
    net = Net(VOCAB, LENGTH, **shape)
    for m in net.body:
        fully_shard(m, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--delay", type=int, default=6)
    ap.add_argument("--weight", type=float, default=2.0)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    gen = build(mesh, 51, dim=12, depth=1, out=VOCAB)
    dis = build(mesh, 52, dim=20, depth=2, out=1)
    gen_opt = torch.optim.AdamW(gen.parameters(), lr=1e-2, eps=1e-6)
    dis_opt = torch.optim.AdamW(dis.parameters(), lr=5e-3, eps=1e-6, weight_decay=0.02)
    keeper = Keeper({"gen": (gen, gen_opt), "dis": (dis, dis_opt)})
    first = keeper.load(a.resume) if a.resume else 0

    def mine(t):
        return t.chunk(world)[rank]

    for step in range(first, a.steps):
        ids, hide = mine(sequences(step, a.batch)), mine(masks(step, a.batch, 0.3))
        logits = gen(torch.where(hide, MASK, ids))
        g_loss = F.cross_entropy(logits[hide], ids[hide])
        g_loss.backward()
        gen_opt.step()
        gen_opt.zero_grad()

        # sampling by inverse CDF with shared uniforms: the same tokens whatever the number of ranks
        cdf = torch.softmax(logits.detach(), -1).cumsum(-1)
        drawn = (cdf < mine(uniforms(step, a.batch))[..., None]).sum(-1).clamp(max=VOCAB - 1)
        fake = torch.where(hide, drawn, ids)
        d_loss = torch.zeros(())
        if step >= a.delay:
            d_loss = F.binary_cross_entropy_with_logits(dis(fake).squeeze(-1), (fake != ids).float())
            (a.weight * d_loss).backward()
            torch.nn.utils.clip_grad_norm_(dis.parameters(), 1.0)
            dis_opt.step()
            dis_opt.zero_grad()
        s = torch.stack([g_loss.detach(), d_loss.detach()]) / world
        dist.all_reduce(s)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} generator {s[0]:.4f} discriminator {s[1]:.4f}", flush=True)
        if a.out and a.save_every and (step + 1) % a.save_every == 0:
            keeper.save(a.out, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
