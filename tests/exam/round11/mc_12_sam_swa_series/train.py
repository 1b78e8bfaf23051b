"""Short-term load forecasting with SAM and averaged weights."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from modules import ConvForecaster
from sam import SAM
from swa import WeightAverage

STEPS, SWA_FROM, SWA_EVERY, BATCH = 18, 12, 2, 64


def load_curves(n=640, length=32, horizon=4, seed=5):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length + horizon)[None].float()
    phase = 6.283 * torch.rand(n, 1, generator=g)
    level = 1 + torch.rand(n, 1, generator=g)
    y = level * torch.sin(t / 4 + phase) + 0.4 * torch.sin(t / 1.7 + 2 * phase) + 0.02 * level * t
    y = y + 0.05 * torch.randn(y.shape, generator=g)
    return y[:, :length], y[:, length:]


def build():
    model = ConvForecaster()
    for part in (model.c1, model.c2):
        fully_shard(part)
    # recalibration runs forwards without backward, so the root is resharded as well
    return fully_shard(model, reshard_after_forward=True)


def tensors(model, opt, average):
    return {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt),
            "shadow": get_model_state_dict(average.shadow)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_curves()
    torch.manual_seed(40)
    model, average = build(), WeightAverage(build())
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sam = SAM(model, base, rho=0.05)

    start = 0
    if args.resume:
        path = os.path.join(args.resume, max(os.listdir(args.resume)))
        state = {**tensors(model, base, average), "step": 0, "snapshots": 0}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        set_model_state_dict(average.shadow, state["shadow"])
        set_optimizer_state_dict(model, base, state["opt"])
        start, average.count = state["step"], state["snapshots"]

    per_epoch = len(x) // BATCH
    for step in range(start + 1, STEPS + 1):
        epoch, at = divmod(step - 1, per_epoch)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        rows = order[at * BATCH:(at + 1) * BATCH].chunk(world)[rank]

        def closure():
            loss = F.huber_loss(model(x[rows]), y[rows])
            loss.backward()
            return loss.detach()

        loss = sam.step(closure)
        if step >= SWA_FROM and (step - SWA_FROM) % SWA_EVERY == 0:
            average.absorb(model)
        if step % 3 == 0:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step} loss {loss.item() / world:.6f} snapshots {average.count}")
        if args.save_every and step % args.save_every == 0:
            dcp.save({**tensors(model, base, average), "step": step, "snapshots": average.count},
                     checkpoint_id=os.path.join(args.out, f"{step:04d}"))

    average.recalibrate([part.chunk(world)[rank] for part in x.split(160)])
    with torch.no_grad():
        err = (average.shadow(x[rank::world]) - y[rank::world]).square().sum()
        dist.all_reduce(err)
    if rank == 0:
        print(f"averaged model mse {err.item() / y.numel():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
