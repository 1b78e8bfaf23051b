"""Two-tower rating model; the result is an int8 file for the serving side, checked after training."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import TwoTower
from quantize import dequantized, quantized_state

USERS, ITEMS, BATCH, STEPS = 60, 40, 128, 100


class Ratings:
    def __init__(self):
        g = torch.Generator().manual_seed(8)
        # popular ids come first and are drawn much more often
        self.user_p = 1.0 / torch.arange(1, USERS + 1).float()
        self.item_p = 1.0 / torch.arange(1, ITEMS + 1).float()
        self.user_feat = torch.randn(USERS, 6, generator=g)
        self.item_feat = torch.randn(ITEMS, 6, generator=g)
        self.taste = torch.randn(USERS, 4, generator=g)
        self.style = torch.randn(ITEMS, 4, generator=g)

    def draw(self, key, n):
        g = torch.Generator().manual_seed(key)
        u = torch.multinomial(self.user_p, n, replacement=True, generator=g)
        i = torch.multinomial(self.item_p, n, replacement=True, generator=g)
        r = (self.taste[u] * self.style[i]).sum(1) + 0.2 * torch.randn(n, generator=g)
        return (u, self.user_feat[u], i, self.item_feat[i]), r


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = Ratings()
    torch.manual_seed(2)
    model = TwoTower(USERS, ITEMS)
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "optim": o, "step": step}

    step = 0
    if args.resume:
        newest = max(int(d) for d in os.listdir(args.resume))
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=os.path.join(args.resume, str(newest)))
        set_state_dict(model, opt, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        step = loaded["step"]

    while step < STEPS:
        inputs, rating = data.draw(3000 + step, BATCH)
        pred = model(*(t[rank::world] for t in inputs))
        loss = (pred - rating[rank::world]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} mse {loss.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(state(step), checkpoint_id=os.path.join(args.out, str(step)))

    int8 = quantized_state(model)
    with torch.no_grad():
        inputs, rating = data.draw(99, 256)
        float_pred = model(*inputs)
    if rank == 0:
        served = TwoTower(USERS, ITEMS)
        served.load_state_dict(dequantized(int8))
        with torch.no_grad():
            int8_pred = served(*inputs)
        print(f"test mse float {(float_pred - rating).square().mean():.4f} int8 {(int8_pred - rating).square().mean():.4f}", flush=True)
        if args.export:
            torch.save(int8, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
