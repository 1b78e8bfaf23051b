"""GAN on 1-d waves. The generator is trained by relaying the discriminator's gradient with respect to the pictures:
the loss is differentiated down to the fakes first and the result is pushed through the generator afterwards.
A sharded average of the generator is kept for sampling.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 < len(self.layers):
                x = F.leaky_relu(x, 0.2)
        return x


class Gan:
    D_STEPS = 2

    def __init__(self, rank, world, batch=32):
        self.rank, self.world, self.batch = rank, world, batch
        torch.manual_seed(15)
        self.g, self.d, self.g_avg = Net([6, 32, 32, 24]), Net([24, 32, 32, 1]), Net([6, 32, 32, 24])
        self.g_avg.load_state_dict(self.g.state_dict())
        self.g_avg.requires_grad_(False)
        for net in (self.g, self.d, self.g_avg):
            fully_shard(net.layers[1])
            fully_shard(net, reshard_after_forward=True)
        self.og = torch.optim.Adam(self.g.parameters(), lr=1e-3, betas=(0.0, 0.99))
        self.od = torch.optim.RMSprop(self.d.parameters(), lr=1e-3)
        self.gen = torch.Generator().manual_seed(16)
        self.round = 0

    def cut(self, t):
        return t.chunk(self.world)[self.rank]

    def real(self):
        f = 0.3 + 0.4 * torch.rand(self.batch, 1, generator=self.gen)
        ph = 6.28 * torch.rand(self.batch, 1, generator=self.gen)
        return self.cut(torch.sin(f * torch.arange(24.0) + ph))

    def z(self):
        return self.cut(torch.randn(self.batch, 6, generator=self.gen))

    def turn_d(self):
        with torch.no_grad():
            fake = self.g(self.z())
        loss = F.softplus(-self.d(self.real())).mean() + F.softplus(self.d(fake)).mean()
        self.od.zero_grad()
        loss.backward()
        self.od.step()
        return loss.item()

    def turn_g(self):
        fake = self.g(self.z())
        leaf = fake.detach().requires_grad_()
        self.d.requires_grad_(False)
        loss = F.softplus(-self.d(leaf)).mean()
        loss.backward()
        self.d.requires_grad_(True)
        self.og.zero_grad()
        fake.backward(leaf.grad)
        self.og.step()
        with torch.no_grad():
            for a, p in zip(self.g_avg.parameters(), self.g.parameters()):
                a.lerp_(p.detach(), 0.1)
        return loss.item()

    def rounds(self, total):
        while self.round < total:
            d = [self.turn_d() for _ in range(self.D_STEPS)]
            g = self.turn_g()
            self.round += 1
            yield self.round, sum(d) / len(d), g

    def save(self, folder):
        """One file, written by rank 0 from gathered tensors."""
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        out = {"g": get_state_dict(self.g, self.og, options=opts), "d": get_state_dict(self.d, self.od, options=opts),
               "avg": {n: p.full_tensor() for n, p in self.g_avg.named_parameters()},
               "gen": self.gen.get_state(), "round": self.round}
        if self.rank == 0:
            os.makedirs(folder, exist_ok=True)
            torch.save(out, os.path.join(folder, f"gan-{self.round}.pt"))
        dist.barrier()

    def load(self, folder):
        names = [n for n in os.listdir(folder) if n.startswith("gan-")]
        sd = torch.load(os.path.join(folder, max(names, key=lambda n: int(n[4:-3]))))
        opts = StateDictOptions(full_state_dict=True)
        for net, opt, key in ((self.g, self.og, "g"), (self.d, self.od, "d")):
            set_state_dict(net, opt, model_state_dict=sd[key][0], optim_state_dict=sd[key][1], options=opts)
        for n, p in self.g_avg.named_parameters():
            with torch.no_grad():
                if isinstance(p, DTensor):
                    p.copy_(torch.distributed.tensor.distribute_tensor(sd["avg"][n], p.device_mesh, p.placements))
                else:
                    p.copy_(sd["avg"][n])
        self.gen.set_state(sd["gen"])
        self.round = sd["round"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=16)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    gan = Gan(dist.get_rank(), dist.get_world_size())
    if args.resume:
        gan.load(args.resume)
    for n, d, g in gan.rounds(args.rounds):
        if gan.rank == 0:
            print(f"round {n} d {d:.4f} g {g:.4f}", flush=True)
        if args.out and args.save_every and n % args.save_every == 0:
            gan.save(args.out)
    with torch.no_grad():
        sample = gan.g_avg(torch.ones(2, 6))
    if gan.rank == 0:
        print("sample", [round(v, 4) for v in sample[0, :4].tolist()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
