"""Diffusion policy by imitation; the averaged weights are evaluated and delivered."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ema import ShardedEMA
from policy import DenoisingPolicy, alpha_bar, demos


def share(t):
    return t.chunk(dist.get_world_size())[dist.get_rank()]


def denoise_loss(model, obs, act, gen):
    """The noise is drawn for the global batch, so that it does not depend on the number of ranks."""
    t = torch.rand(len(obs), generator=gen) * 0.96 + 0.02
    eps = torch.randn(act.shape, generator=gen)
    a = alpha_bar(t)[:, None]
    noisy = a.sqrt() * act + (1 - a).sqrt() * eps
    pred = model(share(noisy), share(obs), share(t))
    return (pred - share(eps)).pow(2).mean()


def mean_over_ranks(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return (x / dist.get_world_size()).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path, default=pathlib.Path("dp"))
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export", type=pathlib.Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DenoisingPolicy()
    fully_shard(model.cond)
    fully_shard(model.mid)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    ema = ShardedEMA(model, decay=0.98)
    obs, act = demos()
    gen = torch.Generator().manual_seed(99)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "ema": ema.state_dict(), "gen": gen.get_state(), "step": 0}
        dcp.load(state, checkpoint_id=str(max(args.resume.iterdir(), key=lambda d: int(d.name))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        ema.load_state_dict(state["ema"])
        gen.set_state(state["gen"])
        step = state["step"]

    while step < args.steps:
        rows = torch.randint(len(obs), (args.batch,), generator=gen)
        loss = denoise_loss(model, obs[rows], act[rows], gen)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        ema.update(model)
        step += 1
        value = mean_over_ranks(loss)
        if rank == 0 and step % 8 == 0:
            print(f"step {step} loss {value:.4f}")
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "ema": ema.state_dict(), "gen": gen.get_state(), "step": step},
                     checkpoint_id=str(args.out / str(step)))

    ema.swap(model)
    with torch.no_grad():
        value = mean_over_ranks(denoise_loss(model, obs[:128], act[:128], torch.Generator().manual_seed(1)))
    if rank == 0:
        print(f"averaged weights: denoising loss {value:.4f}")
    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
