import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from data import InstructionSet
from export import merged_state
from lora import adapters, freeze_base
from model import ChatModel

ONLY_ADAPTERS = StateDictOptions(ignore_frozen_params=True, strict=False)


def parse():
    ap = argparse.ArgumentParser(description="LoRA instruction tuning")
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--export-every", type=int, default=10, help="steps between two merged snapshots for the serving team")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    data = InstructionSet(vocab=24, size=256, max_prompt=4, seed=5)

    torch.manual_seed(11)
    model = ChatModel(vocab=24, dim=32, depth=2, max_len=data.width)
    freeze_base(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(adapters(model).values(), lr=args.lr, weight_decay=0.0)

    start = 0
    if args.resume:
        last = max(int(d.split("-")[1]) for d in os.listdir(args.resume) if d.startswith("adapter-"))
        m, o = get_state_dict(model, opt, options=ONLY_ADAPTERS)
        box = {"model": m, "optim": o}
        dcp.load(box, checkpoint_id=os.path.join(args.resume, f"adapter-{last}"))
        set_state_dict(model, opt, model_state_dict=box["model"], optim_state_dict=box["optim"], options=ONLY_ADAPTERS)
        start = last

    for step in range(start, args.steps):
        ids, mask = data.batch(step, args.batch, rank, world)
        logits = model(ids[:, :-1])
        nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        nll = (nll * mask[:, 1:].flatten()).sum()
        count = mask[:, 1:].sum()
        dist.all_reduce(count)
        (nll * world / count).backward()
        torch.nn.utils.clip_grad_norm_(adapters(model).values(), 1.0)
        opt.step()
        opt.zero_grad()

        done = step + 1
        total = nll.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and done % 4 == 0:
            print(f"step {done} loss {total / count:.4f}", flush=True)
        if done % args.export_every == 0:
            snapshot = merged_state(model)
            if rank == 0:
                size = sum(t.double().square().sum() for t in snapshot.values()).sqrt()
                print(f"snapshot {done}: {len(snapshot)} tensors, norm {size:.4f}", flush=True)
                if args.out:
                    os.makedirs(args.out, exist_ok=True)
                    torch.save(snapshot, os.path.join(args.out, f"merged-{done}.pt"))
        if args.save_every and done % args.save_every == 0 and done < args.steps:
            m, o = get_state_dict(model, opt, options=ONLY_ADAPTERS)
            dcp.save({"model": m, "optim": o}, checkpoint_id=os.path.join(args.out, f"adapter-{done}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
