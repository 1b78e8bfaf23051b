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
from torch.distributed.tensor import distribute_tensor


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


@torch.no_grad()
def add_noise(model, step, sigma):
    """The same full-size noise is drawn on every rank; each keeps the part of its shard."""
    g = torch.Generator().manual_seed(4242 + step)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=g) * sigma
        p.grad.add_(distribute_tensor(noise, p.device_mesh, p.placements))


class Average:
    """Moving average of the local shards, kept as DTensors so that it can be saved whole."""

    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {k: p.detach().clone() for k, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for k, p in model.named_parameters():
            self.shadow[k].lerp_(p, 1 - self.decay)

    def full(self):
        return {k: v.full_tensor() for k, v in self.shadow.items()}

    def load(self, full):
        for k, v in self.shadow.items():
            v.copy_(distribute_tensor(full[k], v.device_mesh, v.placements))


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
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    avg = Average(model)
    start = 0
    if args.resume:
        start, extra = load_checkpoint(args.resume, model, opt)
        if start:
            avg.load(extra["average"])
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(600 + step)
        ids = torch.randint(0, 24, (args.batch, 12), generator=g)[rank::world]
        tags = (ids // 6 + ids.roll(1, 1) // 12) % 4

        opt.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
        loss.backward()
        add_noise(model, step, 0.02 / (1 + step) ** 0.55)
        opt.step()
        avg.update(model)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt, {"average": avg.full()})
    if args.export:
        average = avg.full()
        if rank == 0:
            torch.save(average, args.export)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
