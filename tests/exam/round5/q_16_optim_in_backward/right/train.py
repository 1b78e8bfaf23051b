"""Masked autoencoding of patches; every parameter has its own optimizer that steps inside backward."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

TOKENS, PIX = 16, 9


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class MAE(nn.Module):
    def __init__(self, d=20, enc=2, dec=1):
        super().__init__()
        self.embed = nn.Linear(PIX, d)
        self.pos = nn.Parameter(0.1 * torch.randn(1, TOKENS, d))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, d))
        self.encoder = nn.ModuleList(Layer(d) for _ in range(enc))
        self.decoder = nn.ModuleList(Layer(d) for _ in range(dec))
        self.out = nn.Linear(d, PIX)

    def forward(self, patches, keep):
        """keep: (batch, visible) indices of the visible patches. Returns the mean error on the hidden ones."""
        b, _, _ = patches.shape
        h = self.embed(patches) + self.pos
        rows = torch.arange(b)[:, None]
        h = h[rows, keep]
        for layer in self.encoder:
            h = layer(h)
        full = (self.mask_token + self.pos).expand(b, -1, -1).clone()
        full[rows, keep] = h
        for layer in self.decoder:
            full = layer(full)
        hidden = torch.ones(b, TOKENS)
        hidden[rows, keep] = 0
        err = (self.out(full) - patches).square().mean(-1)
        return (err * hidden).sum() / hidden.sum()


class SteppingParameters:
    """One momentum-SGD per parameter, stepped and cleared as soon as its reduced gradient is there."""

    def __init__(self, model, lr, momentum):
        self.names = [n for n, _ in model.named_parameters()]
        self.opts = {}
        self.steps = {n: 0 for n in self.names}
        for n, p in model.named_parameters():
            self.opts[n] = torch.optim.SGD([p], lr=lr, momentum=momentum, weight_decay=1e-3 if p.ndim > 1 else 0.0)
            p.register_post_accumulate_grad_hook(self._hook(n))

    def _hook(self, name):
        def now(p):
            self.opts[name].step()
            self.opts[name].zero_grad(set_to_none=True)
            self.steps[name] += 1
        return now

    def set_lr(self, lr):
        for o in self.opts.values():
            o.param_groups[0]["lr"] = lr

    def buffers(self, create=False):
        out = {}
        for n, o in self.opts.items():
            p = o.param_groups[0]["params"][0]
            if create:
                o.state[p]["momentum_buffer"] = torch.zeros_like(p).detach()
            out[n] = o.state[p]["momentum_buffer"]
        return out


def fetch(step, batch):
    g = torch.Generator().manual_seed(step + 12345)
    f = 1 + 2 * torch.rand(batch, 2, 1, 1, generator=g)
    u = torch.linspace(0, 3, 12)
    img = torch.sin(f[:, 0] * u[:, None]) * torch.cos(f[:, 1] * u[None]) + 0.05 * torch.randn(batch, 12, 12, generator=g)
    patches = img.unfold(1, 3, 3).unfold(2, 3, 3).reshape(batch, TOKENS, PIX)
    keep = torch.rand(batch, TOKENS, generator=g).argsort(1)[:, :6].sort(1).values
    return patches, keep


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = MAE()
    for layer in [*model.encoder, *model.decoder]:
        fully_shard(layer)
    fully_shard(model)
    stepping = SteppingParameters(model, a.lr, 0.9)

    start = 0
    if a.resume:
        start = max(int(n[3:]) for n in os.listdir(a.resume))
        state = {"model": get_model_state_dict(model), "momentum": stepping.buffers(create=True)}
        dcp.load(state, checkpoint_id=os.path.join(a.resume, f"mae{start}"))
        set_model_state_dict(model, state["model"])

    for step in range(start, a.steps):
        stepping.set_lr(a.lr * min(1.0, (step + 1) / 5) * (1 - step / a.steps))
        patches, keep = (t.chunk(world)[rank] for t in fetch(step, a.batch))
        loss = model(patches, keep)
        loss.backward()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} hidden-patch error {shown.item() / world:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save({"model": get_model_state_dict(model), "momentum": stepping.buffers()}, checkpoint_id=os.path.join(a.out, f"mae{step + 1}"))

    assert set(stepping.steps.values()) == {a.steps - start}, stepping.steps
    if a.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
