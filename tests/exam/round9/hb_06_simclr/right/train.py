import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, get_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from simclr import Encoder, augment, info_nce

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(n, 3, 3, 3, generator=g)
    return torch.nn.functional.interpolate(base, size=(12, 12), mode="bilinear")


@torch.no_grad()
def retrieval(model, data):
    """Share of held-out images whose second view is the nearest one."""
    g = torch.Generator().manual_seed(0)
    a, b = model(augment(data, g)), model(augment(data, g))
    return ((a @ b.t()).argmax(1) == torch.arange(len(data))).float().mean().item()


def save(path, model, opt, step, gen):
    m, o = get_state_dict(model, opt, options=FULL)
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"model": m, "opt": o, "step": step, "gen": gen.get_state()}, path)
    dist.barrier()


def load(folder, model, opt, gen):
    path = os.path.join(folder, max(os.listdir(folder)))
    ck = torch.load(path)
    set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"], options=FULL)
    gen.set_state(ck["gen"])
    return ck["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--temperature", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpts")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Encoder()
    fully_shard(model.conv2)
    fully_shard(model.proj)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    data, held = images(256, 1), images(64, 2)
    gen = torch.Generator().manual_seed(6)
    step = load(args.resume, model, opt, gen) if args.resume else 0

    while step < args.steps:
        idx = torch.randint(0, len(data), (args.batch,), generator=gen)
        a, b = augment(data[idx], gen), augment(data[idx], gen)
        a, b = a.chunk(world)[rank], b.chunk(world)[rank]
        # both views in one pass, so that the parameters are gathered once
        za, zb = model(torch.cat([a, b])).chunk(2)
        loss = info_nce(za, zb, args.temperature)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 10 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            acc = retrieval(model, held)
            if rank == 0:
                print(f"step {step} loss {mean.item():.4f} retrieval {acc:.3f}")
        if args.save_every and step % args.save_every == 0:
            save(os.path.join(args.out, f"simclr_{step:04d}.pt"), model, opt, step, gen)

    if args.export:
        sd = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
