import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gradcache import cached_step, embed, gather
from towers import ImageTower, TextTower, Temperature


def pairs(seed, n=32):
    """A picture with two bright dots and a caption that names their cells."""
    g = torch.Generator().manual_seed(seed)
    cells = torch.rand(n, 12, generator=g).topk(2, dim=1).indices
    img = torch.zeros(n, 12)
    img.scatter_(1, cells, 1.0)
    img = img.view(n, 1, 3, 4).repeat_interleave(4, 2).repeat_interleave(3, 3)
    img = img + 0.2 * torch.randn(n, 1, 12, 12, generator=g)
    filler = torch.randint(12, 24, (n, 2), generator=g)
    return img, torch.cat([cells, filler], 1)


def mine(batch):
    return [t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch]


def recall(model):
    images, texts = mine(pairs(0))
    a, b = gather(embed(model["image"], [images])), gather(embed(model["text"], [texts]))
    return ((a @ b.T).argmax(1) == torch.arange(len(a))).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--chunk", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(33)
    model = nn.ModuleDict({"image": ImageTower(16), "text": TextTower(16), "temperature": Temperature()})
    # the towers are called on their own, each is a root of FSDP
    for part in model.values():
        fully_shard(part, reshard_after_forward=True)
    optim = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.05, eps=1e-6)

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.rsplit("_", 1)[1]))
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step in range(start, args.steps):
        images, texts = mine(pairs(step + 1))
        loss = cached_step(model["image"], model["text"], model["temperature"], images, texts, args.chunk)
        optim.step()
        optim.zero_grad()
        done = step + 1
        if done % 6 == 0:
            r = recall(model)
            if dist.get_rank() == 0:
                print(f"step {done} loss {loss:.4f} recall@1 {r:.3f}", flush=True)
        if args.save_every and done % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": done}, checkpoint_id=os.path.join(args.out, f"at_{done}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
