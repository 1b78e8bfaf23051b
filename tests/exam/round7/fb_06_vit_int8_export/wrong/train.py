import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from quantise import dequantise, quantised_state_dict
from vit import TinyViT


class AppState(Stateful):
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched, self.step = model, opt, sched, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "sched": self.sched.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.sched.load_state_dict(sd["sched"])
        self.step = sd["step"]


def digits(n, seed):
    """Five fixed glyphs with shifts and noise."""
    glyphs = 1.5 * torch.randn(5, 6, 6, generator=torch.Generator().manual_seed(77)).sign()
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    x = 0.3 * torch.randn(n, 1, 8, 8, generator=g)
    dx, dy = (2 * torch.randint(0, 2, (2, n), generator=g)).tolist()
    for i in range(n):
        x[i, 0, dy[i]:dy[i] + 6, dx[i]:dx[i] + 6] += glyphs[y[i]]
    return x, y


@torch.no_grad()
def test_loss(model):
    x, y = digits(128, 10**6)
    logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(-1) == y).float().mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--export", default="export/model_int8.pt")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = TinyViT()
    for blk in model.blocks:
        fully_shard(blk)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps, pct_start=0.2)
    app = AppState(model, opt, sched)
    if args.resume:
        newest = max((int(d) for d in os.listdir(args.resume) if d.isdigit()))
        dcp.load({"app": app}, checkpoint_id=os.path.join(args.resume, str(newest)))

    while app.step < args.steps:
        x, y = (t.chunk(world)[rank] for t in digits(args.batch, app.step))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        app.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {app.step:3d} loss {mean.item() / world:.5f}")
        if args.save_every and app.step % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, str(app.step)))

    float_loss, float_acc = test_loss(model)
    model.reshard()  # the root stays gathered after a forward without backward
    exported = quantised_state_dict(model)
    if rank == 0:
        os.makedirs(os.path.dirname(args.export) or ".", exist_ok=True)
        torch.save(exported, args.export)
        deployed = TinyViT()
        deployed.load_state_dict(dequantise(torch.load(args.export)))
        int8_loss, int8_acc = test_loss(deployed)
        print(f"test float {float_loss:.5f} ({float_acc:.3f}) int8 {int8_loss:.5f} ({int8_acc:.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
