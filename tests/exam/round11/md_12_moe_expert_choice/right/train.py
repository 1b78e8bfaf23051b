"""Expert-choice mixture of experts with routing and balancing over the global batch."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import PatchClassifier


def batches(start, stop, size, seed=61):
    """Generator of (step, x, y) with this rank's rows; every step has a seed of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fixed = torch.Generator().manual_seed(seed)
    proto = torch.randn(5, 6, 8, generator=fixed)
    for step in range(start, stop):
        g = torch.Generator().manual_seed(seed + 7919 * (step + 1))
        y = torch.randint(5, (size,), generator=g)
        order = torch.rand(size, 6, generator=g).argsort(1)
        x = proto[y].gather(1, order[..., None].expand(-1, -1, 8)) + 0.9 * torch.randn(size, 6, 8, generator=g)
        yield step, x.chunk(world)[rank], y.chunk(world)[rank]


def param_groups(model, lr):
    router = [p for n, p in model.named_parameters() if "router" in n]
    plain = [p for n, p in model.named_parameters() if "router" not in n and p.ndim < 2]
    rest = [p for n, p in model.named_parameters() if "router" not in n and p.ndim >= 2]
    return [{"params": router, "lr": lr / 2, "weight_decay": 0.0},
            {"params": plain, "lr": lr, "weight_decay": 0.0},
            {"params": rest, "lr": lr, "weight_decay": 0.05}]


def save(path, model, opt, step):
    m, o = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"model": m, "opt": o, "step": step}, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ec")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    model = PatchClassifier()
    for block in model.blocks:
        fully_shard(block.moe.bank)
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(param_groups(model, 4e-3))

    start = 0
    if args.resume:
        newest = max(f for f in os.listdir(args.resume) if f.endswith(".pt"))
        state = torch.load(os.path.join(args.resume, newest), weights_only=False)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"],
                       options=StateDictOptions(full_state_dict=True))
        start = state["step"]

    for step, x, y in batches(start, args.steps, args.batch):
        logits, cv2, z = model(x)
        ce = F.cross_entropy(logits, y)
        loss = ce + 0.05 * cv2 + 0.001 * z
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        shown = torch.stack([ce.detach(), cv2.detach()])
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} ce {shown[0] / world:.4f} cv2 {shown[1] / world:.5f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            save(os.path.join(args.out, f"step{step + 1:05d}.pt"), model, opt, step + 1)

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
