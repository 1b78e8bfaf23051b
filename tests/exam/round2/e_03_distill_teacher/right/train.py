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
import torch.distributed.checkpoint as dcp


def newest(folder):
    good = [d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, ".metadata"))]
    return os.path.join(folder, max(good, key=lambda d: int(d.split("-")[1]))) if good else None


def save_dcp(folder, step, model, optim, extra):
    msd, osd = get_state_dict(model, optim)
    dcp.save(
        {"model": msd, "optim": osd, "extra": extra, "step": step}, checkpoint_id=os.path.join(folder, f"step-{step}")
    )


def load_dcp(folder, model, optim, extra):
    path = newest(folder)
    if path is None:
        return 0, extra
    msd, osd = get_state_dict(model, optim)
    state = {"model": msd, "optim": osd, "extra": extra, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"], state["extra"]


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)
    dist.barrier()


class Tagger(nn.Module):
    def __init__(self, d, layers, drop, vocab=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(3 * d, d), nn.GELU(), nn.Dropout(drop)) for _ in range(layers)
        )
        self.head = nn.Linear(d, 4)

    def forward(self, ids):
        x = self.emb(ids)
        for l in self.layers:
            ctx = torch.cat([x.roll(1, 1), x, x.roll(-1, 1)], -1)
            x = x + l(ctx)
        return self.head(x)


def tags(ids):
    return (ids + ids.roll(1, 1)) % 4


def pretrain_teacher(teacher, steps=120):
    opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 16, (32, 10), generator=g)
        loss = F.cross_entropy(teacher(ids).flatten(0, 1), tags(ids).flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    tau = 2.0
    torch.manual_seed(3)
    teacher = Tagger(24, 2, drop=0.2)
    final = pretrain_teacher(teacher)
    if rank == 0:
        print(f"teacher loss {final:.4f}", flush=True)
    teacher.requires_grad_(False)
    teacher.eval()
    torch.manual_seed(4)
    student = Tagger(12, 1, drop=0.0)
    for net in (teacher, student):
        for l in net.layers:
            fully_shard(l, mesh=mesh)
        fully_shard(net, mesh=mesh)
    opt = torch.optim.AdamW(student.parameters(), lr=args.lr)
    start = load_dcp(args.resume, student, opt, {})[0] if args.resume else 0
    torch.manual_seed(100 + rank)
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(9000 + step)
        ids = torch.randint(0, 16, (args.batch, 10), generator=g)[rank::world]
        with torch.no_grad():
            soft = (teacher(ids) / tau).softmax(-1)
        out = student(ids)
        kd = F.kl_div((out / tau).log_softmax(-1).flatten(0, 1), soft.flatten(0, 1), reduction="batchmean") * tau * tau
        ce = F.cross_entropy(out.flatten(0, 1), tags(ids).flatten())
        loss = 0.8 * kd + 0.2 * ce
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} kd {kd.item():.4f} ce {ce.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_dcp(args.out, step + 1, student, opt, {})
    if args.export:
        export(student, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
