import argparse, os, math
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
    get_model_state_dict,
)


def save_checkpoint(out, step, model, optim, extra=None):
    msd, osd = get_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(out, exist_ok=True)
        tmp = os.path.join(out, f"tmp_{step}.part")
        torch.save({"step": step, "model": msd, "optim": osd, "extra": extra or {}}, tmp)
        os.replace(tmp, os.path.join(out, f"step_{step:06d}.pt"))
    dist.barrier()


def load_checkpoint(folder, model, optim):
    files = sorted(f for f in os.listdir(folder) if f.startswith("step_") and f.endswith(".pt"))
    if not files:
        return 0, {}
    ck = torch.load(os.path.join(folder, files[-1]), map_location="cpu", weights_only=False)
    set_state_dict(
        model,
        optim,
        model_state_dict=ck["model"],
        optim_state_dict=ck["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    return ck["step"], ck["extra"]


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)
    dist.barrier()


class Tagger(nn.Module):
    def __init__(self, vocab=24, d=16, tags=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.mix = nn.ModuleList(nn.Linear(3 * d, d) for _ in range(2))
        self.out = nn.Linear(d, tags)

    def forward(self, ids):
        x = self.emb(ids)
        for m in self.mix:
            x = x + F.gelu(m(torch.cat([x.roll(1, 1), x, x.roll(-1, 1)], -1)))
        return self.out(x)


class SAM(torch.optim.SGD):
    """Sharpness-aware SGD: the closure is run at the weights and again at the worst point within rho."""

    def __init__(self, params, rho=0.05, **kw):
        super().__init__(params, **kw)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        sq = torch.stack([p.grad.to_local().square().sum() for p in params]).sum()
        dist.all_reduce(sq)
        factor = self.rho / (sq.sqrt() + 1e-12)
        kept = [p.to_local().clone() for p in params]
        for p in params:
            p.to_local().add_(p.grad.to_local() * factor)
        with torch.enable_grad():
            closure()
        for p, w in zip(params, kept):
            p.to_local().copy_(w)
        super().step()
        return loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Tagger()
    for m in model.mix:
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = SAM(model.parameters(), rho=0.05, lr=args.lr, momentum=0.9)
    start = load_checkpoint(args.resume, model, opt)[0] if args.resume else 0
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(600 + step)
        ids = torch.randint(0, 24, (args.batch, 12), generator=g)[rank::world]
        tags = (ids // 6 + ids.roll(1, 1) // 12) % 4

        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
            loss.backward()
            return loss.detach()

        shown = opt.step(closure)
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt)
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
