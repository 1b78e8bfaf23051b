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
    def __init__(self, vocab=30, d=16, tags=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.convs = nn.ModuleList(nn.Conv1d(d, d, 3, padding=1) for _ in range(2))
        self.out = nn.Linear(d, tags)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        for c in self.convs:
            x = x + F.gelu(c(x))
        return self.out(x.transpose(1, 2))


def make_split(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (n, 12), generator=g)
    tags = (ids // 3 + (ids.roll(1, 1) > 14)) % 5
    flip = torch.rand(n, 12, generator=g) < noise * torch.linspace(0, 2, n)[:, None]
    return ids, torch.where(flip, torch.randint(0, 5, (n, 12), generator=g), tags)


@torch.no_grad()
def validate(model, ids, tags, rank, world):
    model.eval()
    n = len(ids) // world
    mine = slice(rank * n, (rank + 1) * n)
    out = model(ids[mine])
    loss = F.cross_entropy(out.flatten(0, 1), tags[mine].flatten())
    hits = (out.argmax(-1) == tags[mine]).float().mean()
    dist.all_reduce(loss)
    loss /= world
    dist.all_reduce(hits)
    model.train()
    return loss.item(), hits.item() / world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.5)
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
    for c in model.convs:
        fully_shard(c, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.02)
    start = 0
    if args.resume:
        start, extra = load_checkpoint(args.resume, model, opt)
        if start:
            sched.load_state_dict(extra["sched"])
    ids, tags = make_split(128, 1, 0.05)
    val_ids, val_tags = make_split(32, 2, 0.3)
    for step in range(start, args.steps):
        idx = torch.randperm(128, generator=torch.Generator().manual_seed(step))[: args.batch][rank::world]
        loss = F.cross_entropy(model(ids[idx]).flatten(0, 1), tags[idx].flatten())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if (step + 1) % 2 == 0:
            val, acc = validate(model, val_ids, val_tags, rank, world)
            sched.step(val)
            if rank == 0:
                print(
                    f"step {step} loss {loss.item():.4f} val {val:.4f} acc {acc:.3f} lr {opt.param_groups[0]['lr']:.4g}",
                    flush=True,
                )
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt, {"sched": sched.state_dict()})
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
