"""Train an image and a text tower with a contrastive loss over the global batch."""
import argparse
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from towers import TwoTowers, contrastive_loss

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.3)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--ckpt-dir", default="")
parser.add_argument("--resume", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# Pairs: two random views of one latent vector, many of them close to each other.
g = torch.Generator().manual_seed(3)
latent = torch.randn(12, 8, generator=g).repeat_interleave(48, 0) + 0.5 * torch.randn(576, 8, generator=g)
images = torch.tanh(latent @ torch.randn(8, 40, generator=g)) + 0.1 * torch.randn(576, 40, generator=g)
texts = torch.tanh(latent @ torch.randn(8, 24, generator=g)) + 0.1 * torch.randn(576, 24, generator=g)
n_train = 512

torch.manual_seed(1)
model = TwoTowers()
fully_shard(model.image)
fully_shard(model.text)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))


def local_file(folder, step):
    return Path(folder) / f"step{step}" / f"rank{rank}of{world}.pt"


def save(folder, step):
    path = local_file(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({
        "params": [p.to_local() for p in model.parameters()],
        "momentum": [optimizer.state[p]["momentum_buffer"].to_local() for p in model.parameters()],
        "schedule": schedule.state_dict(),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "sampler": sampler.get_state(),
    }, path)
    dist.barrier()


def load(folder):
    step = max(int(re.search(r"step(\d+)", p.name)[1]) for p in Path(folder).glob("step*"))
    saved = torch.load(local_file(folder, step))
    with torch.no_grad():
        for p, value in zip(model.parameters(), saved["params"]):
            p.to_local().copy_(value)
        for p, value in zip(model.parameters(), saved["momentum"]):
            buffer = torch.zeros_like(p)
            buffer.to_local().copy_(value)
            optimizer.state[p]["momentum_buffer"] = buffer
    schedule.load_state_dict(saved["schedule"])
    for group, lr in zip(optimizer.param_groups, saved["lr"]):
        group["lr"] = lr
    sampler.set_state(saved["sampler"])
    return step


sampler = torch.Generator().manual_seed(17)
start = load(args.resume) if args.resume else 0
share = args.batch // world
for step in range(start, args.steps):
    picked = torch.randint(n_train, (args.batch,), generator=sampler)[rank * share:(rank + 1) * share]
    loss = contrastive_loss(*model(images[picked], texts[picked]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0 and (step + 1) % 4 == 0:
        print(f"step {step + 1} loss {mean.item() / world:.5f}", flush=True)
    if args.save_every and (step + 1) % args.save_every == 0:
        save(args.ckpt_dir, step + 1)

# retrieval on held-out pairs
with torch.no_grad():
    image, text, scale = model(images[n_train:], texts[n_train:])
    logits = scale * image @ text.t()
    held_out = torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))
    recall = (logits.argmax(1) == torch.arange(len(logits))).float().mean()
if rank == 0:
    print(f"held-out loss {held_out.item():.5f} recall@1 {recall.item():.4f}")
dist.destroy_process_group()
