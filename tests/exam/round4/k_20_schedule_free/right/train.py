"""Schedule-free AdamW on a sharded LM with gradient noise. The optimizer keeps z and the average x; the model holds
y while training and x for evaluation. The noise is drawn for the whole tensor and cut, so
it does not depend on the number of ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

VOCAB, SEQ = 30, 16


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, beta1=0.9, beta2=0.98, eps=1e-6, warmup=5):
        super().__init__(params, dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, warmup=warmup))
        self.k, self.weight_sum, self.training = 0, 0.0, True
        for g in self.param_groups:
            for p in g["params"]:
                self.state[p].update(z=p.detach().clone(), x=p.detach().clone(), v=torch.zeros_like(p))

    @torch.no_grad()
    def train(self, on=True):
        if on == self.training:
            return
        self.training = on
        for g in self.param_groups:
            for p in g["params"]:
                s = self.state[p]
                p.copy_(s["z"] * (1 - g["beta1"]) + s["x"] * g["beta1"] if on else s["x"])

    @torch.no_grad()
    def step(self, closure=None):
        assert self.training, "step() in evaluation mode"
        self.k += 1
        for g in self.param_groups:
            lr = g["lr"] * min(1.0, self.k / g["warmup"])
            weight = lr**2
            self.weight_sum += weight
            c = weight / self.weight_sum
            for p in g["params"]:
                s = self.state[p]
                s["v"].mul_(g["beta2"]).addcmul_(p.grad, p.grad, value=1 - g["beta2"])
                denom = (s["v"] / (1 - g["beta2"] ** self.k)).sqrt_().add_(g["eps"])
                s["z"].addcdiv_(p.grad, denom, value=-lr)
                s["x"].lerp_(s["z"], c)
                p.copy_(s["z"] * (1 - g["beta1"]) + s["x"] * g["beta1"])


@torch.no_grad()
def add_noise(model, step, scale):
    """Annealed Gaussian noise on the gradients, the same for the whole tensor on every rank."""
    for i, p in enumerate(model.parameters()):
        g = torch.Generator().manual_seed(step * 997 + i)
        whole = torch.randn(p.shape, generator=g) * (scale / (1 + step) ** 0.55)
        noise = DTensor.from_local(whole, p.device_mesh, [Replicate()], run_check=False)
        p.grad.add_(noise.redistribute(p.device_mesh, p.placements))


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n = nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.n(x)).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.f(x)


class LM(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.e, self.p = nn.Embedding(VOCAB, d), nn.Embedding(SEQ, d)
        self.layers = nn.ModuleList([Layer(d), Layer(d)])
        self.h = nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.e(ids) + self.p(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.h(x)


def rows(seed, n):
    g = torch.Generator().manual_seed(seed)
    start, stride = torch.randint(VOCAB, (n, 1), generator=g), torch.randint(1, 5, (n, 1), generator=g)
    return (start + stride * torch.arange(SEQ + 1)) % VOCAB


def snapshot(model, opt):
    """Everything by parameter name; optimizer tensors are DTensors like the parameters themselves."""
    sd = {"step": opt.k, "weight_sum": opt.weight_sum}
    for n, p in model.named_parameters():
        sd[f"y/{n}"] = p.detach()
        for k in ("z", "x", "v"):
            sd[f"{k}/{n}"] = opt.state[p][k]
    return sd


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--noise", type=float, default=1e-3)
    ap.add_argument("--eval-every", type=int, default=6)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(33)
    model = LM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = ScheduleFree(model.parameters())

    if a.resume:
        sd = snapshot(model, opt)
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))  # loads in place
        opt.k, opt.weight_sum = sd["step"], sd["weight_sum"]

    test = rows(10**6, 32)[rank::world]
    for step in range(opt.k, a.steps):
        part = rows(step, a.batch)[rank::world]
        loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        loss.backward()
        add_noise(model, step, a.noise)
        opt.step()
        opt.zero_grad()
        if (step + 1) % a.eval_every == 0:
            opt.train(False)
            with torch.no_grad():
                val = F.cross_entropy(model(test[:, :-1]).flatten(0, 1), test[:, 1:].flatten())
            model.reshard()              # the root stays gathered after a forward without backward
            opt.train(True)
            both = torch.stack([loss.detach(), val]) / world
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step + 1} loss {both[0]:.4f} valid (average) {both[1]:.4f}", flush=True)
        if a.out and a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(snapshot(model, opt), checkpoint_id=os.path.join(a.out, f"sf_{step + 1:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
