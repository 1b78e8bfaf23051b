"""Small MoE language model, built on the meta device and sharded before it is materialised."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from init import init_weights
from moe import MoELM


def sample(step, size, vocab=32, length=16):
    g = torch.Generator().manual_seed(9000 + step)
    a = torch.randint(1, 6, (size, 1), generator=g)
    start = torch.randint(vocab, (size, 1), generator=g)
    seq = (start + a * torch.arange(length + 1)) % vocab
    noise = torch.rand(seq.shape, generator=g) < 0.03
    return torch.where(noise, torch.randint(vocab, seq.shape, generator=g), seq)


def build(seed):
    with torch.device("meta"):
        model = MoELM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


def checkpoint(model, opt, step, folder):
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "optim": osd, "step": step}, checkpoint_id=os.path.join(folder, f"it{step:06d}"))


def restore(model, opt, folder):
    path = os.path.join(folder, sorted(os.listdir(folder))[-1])
    msd, osd = get_state_dict(model, opt)
    state = {"model": msd, "optim": osd, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(args.seed)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, eps=1e-6)
    begin = restore(model, opt, args.resume) if args.resume else 0
    for step in range(begin, args.steps):
        seq = sample(step, args.batch).chunk(world)[rank]
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 6 == 0:
            print(f"{step + 1} {mean.item():.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpoint(model, opt, step + 1, args.out)
    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    dist.init_process_group("gloo")
    train(ap.parse_args())
    dist.destroy_process_group()
