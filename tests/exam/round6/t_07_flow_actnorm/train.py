import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from flow import Flow


def windows(step, n, dim=16):
    """Windows of a noisy AR(1) process around a trend, with a scale that grows along the window."""
    g = torch.Generator().manual_seed(60 + step)
    e = torch.randn(n, dim, generator=g)
    x = torch.zeros(n, dim)
    x[:, 0] = e[:, 0]
    for i in range(1, dim):
        x[:, i] = 0.8 * x[:, i - 1] + 0.6 * e[:, i]
    x = x + 0.5 * torch.randn(n, 1, generator=g)
    return x * torch.linspace(0.5, 4.0, dim) + torch.linspace(-2, 6, dim)


def my_part(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def save(folder, step, model, opt):
    m, o = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save({"model": m, "opt": o, "step": step}, os.path.join(folder, f"flow_{step:04d}.pt"))
    dist.barrier()


def load(folder, model, opt):
    ck = torch.load(os.path.join(folder, max(os.listdir(folder))), weights_only=False)
    set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"],
                   options=StateDictOptions(full_state_dict=True))
    return ck["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    p.add_argument("--export")
    args = p.parse_args()
    dist.init_process_group("gloo")

    torch.manual_seed(8)
    model = Flow()
    if not args.resume:
        model.data_init(my_part(windows(0, args.batch)))
    for s in model.steps:
        fully_shard(s)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-6)
    start = load(args.resume, model, opt) if args.resume else 0

    for step in range(start, args.steps):
        loss = model(my_part(windows(step, args.batch))).mean()
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        nll = loss.detach().clone()
        dist.all_reduce(nll)
        if dist.get_rank() == 0 and step % 4 == 3:
            print(f"{step + 1} nll/dim {nll.item() / dist.get_world_size():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt)

    weights, _ = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and dist.get_rank() == 0:
        torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
