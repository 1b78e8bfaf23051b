import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from lora import Encoder, adapter_parameters, add_lora
from stopper import EarlyStopping

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=120)
ap.add_argument("--eval-every", type=int, default=4)
ap.add_argument("--batch", type=int, default=16)
ap.add_argument("--lr", type=float, default=2e-2)
ap.add_argument("--save-every", type=int, default=0)
ap.add_argument("--out", default="lora_ckpt")
ap.add_argument("--resume")


def make_data(seed=17, classes=5, dim=20):
    """A small training set with some wrong labels, and a clean validation set."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(dim, classes, generator=g)
    x = torch.randn(96 + 160, dim, generator=g)
    y = (x @ w + 0.5 * torch.randn(len(x), classes, generator=g)).argmax(1)
    flip = torch.rand(96, generator=g) < 0.2
    y[:96] = torch.where(flip, torch.randint(classes, (96,), generator=g), y[:96])
    return (x[:96], y[:96]), (x[96:], y[96:])


@torch.no_grad()
def validation_loss(model, x, y, rank, world):
    model.eval()
    total = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank], reduction="sum")
    dist.all_reduce(total)
    model.train()
    return total.item() / len(x)


def save(folder, step, model, opt, stopper, gen, rank):
    os.makedirs(folder, exist_ok=True)
    torch.save(dict(step=step, gen=gen.get_state(), stopper=stopper.state_dict(), opt=opt.state_dict(),
                    adapter={n: p.detach().to_local() for n, p in adapter_parameters(model).items()}),
               os.path.join(folder, f"shard{rank}.pt"))
    dist.barrier()


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    (x, y), (vx, vy) = make_data()

    torch.manual_seed(40)
    model = add_lora(Encoder())
    model.head.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(adapter_parameters(model).values(), lr=args.lr, weight_decay=0.0)
    stopper = EarlyStopping()
    gen = torch.Generator().manual_seed(41)
    step = 0

    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.rsplit("-", 1)[1]))
        ck = torch.load(os.path.join(args.resume, newest, f"shard{rank}.pt"), weights_only=False)
        with torch.no_grad():
            for n, p in adapter_parameters(model).items():
                p.to_local().copy_(ck["adapter"][n])
        opt.load_state_dict(ck["opt"])
        stopper.load_state_dict(ck["stopper"])
        gen.set_state(ck["gen"])
        step = ck["step"]

    stop = stopper.bad >= stopper.patience
    while step < args.steps and not stop:
        idx = torch.randint(len(x), (args.batch,), generator=gen).chunk(world)[rank]
        loss = F.cross_entropy(model(x[idx]), y[idx])
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % args.eval_every == 0:
            val = validation_loss(model, vx, vy, rank, world)
            stop = stopper.update(step, val, model)
            train = loss.detach().clone()
            dist.all_reduce(train)
            if rank == 0:
                print(f"step {step} train {train.item() / world:.4f} validation {val:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(os.path.join(args.out, f"step-{step}"), step, model, opt, stopper, gen, rank)

    stopper.restore(model)
    final = validation_loss(model, vx, vy, rank, world)
    if rank == 0:
        print(f"restored step {stopper.best_step} (best {stopper.best_loss:.5f}), final validation {final:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(ap.parse_args())
