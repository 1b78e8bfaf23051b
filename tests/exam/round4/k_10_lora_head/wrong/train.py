"""LoRA fine-tuning of a frozen sequence encoder with a new classification head."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import state
from lora import add_lora
from model import Classifier, Encoder

VOCAB, LENGTH, DIM, CLASSES = 30, 16, 24, 4


def load_base():
    """Stands for the pre-trained encoder that is read from a hub."""
    torch.manual_seed(1001)
    return Encoder(VOCAB, LENGTH, DIM)


def batch(step, size):
    g = torch.Generator().manual_seed(31 * step + 7)
    y = torch.randint(CLASSES, (size,), generator=g)
    ids = torch.randint(VOCAB, (size, LENGTH), generator=g)
    marked = torch.rand(size, LENGTH, generator=g) < 0.4
    return torch.where(marked, 2 * y[:, None] + 5, ids), y


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    encoder = load_base()
    torch.manual_seed(args.seed)
    model = Classifier(add_lora(encoder), DIM, CLASSES)
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [q for q in model.parameters() if q.requires_grad]
    opt = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
    start = state.load(args.resume, model, opt) if args.resume else 0
    if rank == 0:
        print(f"training {sum(q.numel() for q in trained)} of {sum(q.numel() for q in model.parameters())} weights", flush=True)

    for step in range(start, args.steps):
        opt.param_groups[0]["lr"] = args.lr * (1 - step / args.steps)
        ids, y = (t.chunk(world)[rank] for t in batch(step, args.batch))
        logits = model(ids)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        opt.step()
        s = torch.stack([loss.detach(), (logits.argmax(-1) == y).float().mean()]) / world
        dist.all_reduce(s)
        if rank == 0 and (step + 1) % 3 == 0:
            print(f"step {step + 1} loss {s[0]:.4f} accuracy {s[1]:.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            state.save(args.out, step + 1, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
