"""EDM-style diffusion: forced weight normalisation, two power-function averages, noise that belongs to the sample."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ema import PowerEMA
from net import EDMNet, normalize_weights

STEPS, BATCH, N = 20, 16, 320


def sample(i):
    g = torch.Generator().manual_seed(10_000 + i)
    fy, fx, ph = (torch.rand(3, generator=g) * 3).tolist()
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 10), torch.linspace(-1, 1, 10), indexing="ij")
    return torch.sin(fy * yy * 2 + fx * xx * 2 + ph)[None]


def minibatch(images, step, rank, world):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(step * BATCH // N))
    at = step * BATCH % N
    ids = order[at:at + BATCH].chunk(world)[rank]
    noise, sigma = [], []
    for i in ids.tolist():
        g = torch.Generator().manual_seed(step * N + i)
        sigma.append((torch.randn((), generator=g) * 1.0 - 0.6).exp())
        noise.append(torch.randn(1, 10, 10, generator=g))
    sigma = torch.stack(sigma)
    return images[ids], torch.stack(noise) * sigma.view(-1, 1, 1, 1), sigma


def edm_loss(model, x, noise, sigma):
    d = model.sigma_data
    weight = (sigma ** 2 + d * d) / (sigma * d) ** 2
    err = (model(x + noise, sigma) - x).pow(2).mean((1, 2, 3))
    return (weight * err).mean()


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


@torch.no_grad()
def loss_with(model, weights, images, rank, world):
    """loss on fixed noise with other weights in the model; the weights in training are put back"""
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.load_state_dict(weights, strict=False)
    total = torch.zeros(())
    for s in (50_000, 50_020):
        total += edm_loss(model, *minibatch(images, s, rank, world))
    dist.all_reduce(total)
    model.reshard()
    model.load_state_dict(kept, strict=False)
    return total.item() / 2 / world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="edm")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(8)
    model = EDMNet()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        # scalars cannot be divided in a useful way; FSDP leaves them on rank 0, which is fine
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    normalize_weights(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-6)
    ema = PowerEMA(model)
    images = torch.stack([sample(i) for i in range(N)])

    step = 0
    if args.resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "ema": ema.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        step = state["step"]

    while step < STEPS:
        for g in opt.param_groups:
            g["lr"] = 1e-2 * min(1, (step + 1) / 4) / max(1.0, step / 10) ** 0.5
        loss = edm_loss(model, *minibatch(images, step, rank, world))
        loss.backward()
        for p in model.parameters():
            g = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            torch.nan_to_num(g, nan=0, posinf=1e5, neginf=-1e5, out=g)
        opt.step()
        opt.zero_grad()
        normalize_weights(model)
        step += 1
        ema.update(model, step)
        log = loss.detach().clone()
        dist.all_reduce(log)
        if rank == 0:
            print(f"{step} {log.item() / world:.5f}")
        if step % 10 == 0:
            losses = [loss_with(model, t, images, rank, world) for t in ema.tracks]
            if rank == 0:
                print("averages:", " ".join(f"{v:.5f}" for v in losses))
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "ema": ema.state_dict(), "step": step},
                     checkpoint_id=os.path.join(args.out, f"{step:06d}"))

    if args.export:
        out = {"model": {n: full(p).detach() for n, p in model.named_parameters()}}
        out.update({k: {n: full(p) for n, p in t.items()} for k, t in ema.state_dict().items()})
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
