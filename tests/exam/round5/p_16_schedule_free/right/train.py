"""Schedule-free AdamW: no learning rate schedule, the parameters switch between the gradient point y and the average x."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr, beta1=0.9, beta2=0.99, eps=1e-6):
        super().__init__(params, dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps))
        self.training = True

    @torch.no_grad()
    def step(self, closure=None):
        assert self.training
        for g in self.param_groups:
            for y in g["params"]:
                if y.grad is None:
                    continue
                st = self.state[y]
                if not st:
                    st["k"] = torch.zeros(())
                    st["z"] = y.detach().clone()
                    st["v"] = torch.zeros_like(y)
                st["k"] += 1
                k = st["k"].item()
                st["v"].mul_(g["beta2"]).addcmul_(y.grad, y.grad, value=1 - g["beta2"])
                d = y.grad / ((st["v"] / (1 - g["beta2"] ** k)).sqrt() + g["eps"])
                x = y.lerp(st["z"], 1 - 1 / g["beta1"])        # x from y = (1 - b) z + b x
                st["z"].add_(d, alpha=-g["lr"])
                x.lerp_(st["z"], 1 / k)
                y.copy_(st["z"].lerp(x, g["beta1"]))

    @torch.no_grad()
    def switch(self, training):
        if training == self.training:
            return
        for g in self.param_groups:
            for p in g["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], (1 - g["beta1"]) if training else (1 - 1 / g["beta1"]))
        self.training = training


class Attn(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.ff = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.ff(x)


class LM(nn.Module):
    def __init__(self, vocab=12, d=16, t=14):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(t, d)
        self.blocks = nn.ModuleList(Attn(d) for _ in range(2))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.emb(ids) + self.pos.weight[: ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def batch(step, n, t=13):
    g = torch.Generator().manual_seed(step * 3 + 1)
    a, b = torch.randint(0, 12, (n, 1), generator=g), torch.randint(1, 4, (n, 1), generator=g)
    return (a + b * torch.arange(t)) % 12


def nll(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--eval-every", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="sf")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    model = LM()
    for b in model.blocks:
        fully_shard(b)
    # the evaluation forward must not leave unsharded averages behind for the next training forward
    fully_shard(model, reshard_after_forward=True)
    opt = ScheduleFree(model.parameters(), lr=a.lr)
    step = 0
    if a.resume:
        newest = sorted(os.listdir(a.resume))[-1]
        m, o = get_state_dict(model, opt)
        sd = {"m": m, "o": o}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, newest))
        set_state_dict(model, opt, model_state_dict=sd["m"], optim_state_dict=sd["o"])
        step = int(newest)
    while step < a.steps:
        loss = nll(model, batch(step, a.batch).chunk(world)[rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        s = loss.detach().clone()
        dist.all_reduce(s)
        line = f"step {step} loss {s.item() / world:.4f}"
        if a.save_every and step % a.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o}, checkpoint_id=os.path.join(a.out, f"{step:06d}"))
        if step % a.eval_every == 0:
            opt.switch(False)
            with torch.no_grad():
                v = nll(model, batch(10**6, 64).chunk(world)[rank])
            dist.all_reduce(v)
            opt.switch(True)
            line += f" eval at the average {v.item() / world:.4f}"
        if rank == 0:
            print(line, flush=True)
    opt.switch(False)  # what remains in the model is the average
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
