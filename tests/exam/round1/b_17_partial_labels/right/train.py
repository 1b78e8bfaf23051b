"""Multi-task regression/classification with missing labels, learned task weights and a task curriculum."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

TASKS = ["age", "pose", "kind"]
STARTS = {"age": 0, "pose": 6, "kind": 12}  # step at which a task joins


class Net(nn.Module):
    def __init__(self, w=40):
        super().__init__()
        self.inp = nn.Linear(24, w)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(w), nn.Linear(w, w), nn.SiLU()) for _ in range(3))
        self.heads = nn.ModuleDict({"age": nn.Linear(w, 1), "pose": nn.Linear(w, 3), "kind": nn.Linear(w, 5)})
        self.log_var = nn.Parameter(torch.zeros(len(TASKS)))

    def forward(self, x, targets, masks, counts, active, world):
        """counts: labelled samples per task over ALL ranks. Returns the training loss and the summed task losses."""
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        loss, sums = x.new_zeros(()), []
        for k, t in enumerate(TASKS):
            out = self.heads[t](h)
            if t == "kind":
                each = F.cross_entropy(out, targets[t], reduction="none")
            else:
                each = F.mse_loss(out, targets[t], reduction="none").mean(1)
            total = (each * masks[t]).sum()
            sums.append(total.detach())
            share = total * world / counts[k].clamp(min=1)
            loss = loss + active[k] * (torch.exp(-self.log_var[k]) * share + 0.5 * self.log_var[k])
        return loss, torch.stack(sums)


def table(n=1500, seed=2):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 6, generator=g)
    x = torch.tanh(z @ torch.randn(6, 24, generator=g)) + 0.1 * torch.randn(n, 24, generator=g)
    y = {"age": z[:, :1] * 2 + 1, "pose": z[:, 1:4].sin(), "kind": z[:, 1:].argmax(1)}
    # labels are missing in runs, as if the table had been glued together from several sources
    m = {
        "age": torch.ones(n),
        "pose": (torch.arange(n) % 7 < 3).float(),
        "kind": (torch.rand(n, generator=g) < 0.3).float(),
    }
    return x, y, m


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="partial")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(20)
    model = Net()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    slow = [p for n, p in model.named_parameters() if n == "log_var"]
    fast = [p for n, p in model.named_parameters() if n != "log_var"]
    opt = torch.optim.AdamW(
        [{"params": fast, "weight_decay": 0.01}, {"params": slow, "weight_decay": 0.0, "lr": 1e-2}], lr=4e-3
    )

    step = 0
    if args.resume:
        newest = max((f for f in os.listdir(args.resume) if f.endswith(".pt")), key=lambda f: int(f[5:-3]))
        ck = torch.load(os.path.join(args.resume, newest), weights_only=False, mmap=True)
        set_state_dict(
            model,
            opt,
            model_state_dict=ck["model"],
            optim_state_dict=ck["opt"],
            options=StateDictOptions(full_state_dict=True),
        )
        step = ck["step"]

    x, y, m = table()
    while step < args.steps:
        idx = torch.randint(0, len(x), (args.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        masks = {t: m[t][idx] for t in TASKS}
        counts = torch.stack([masks[t].sum() for t in TASKS])
        dist.all_reduce(counts)
        active = [float(step >= STARTS[t]) for t in TASKS]
        loss, sums = model(x[idx], {t: y[t][idx] for t in TASKS}, masks, counts, active, world)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(fast, 2.0)
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(sums)
        if rank == 0 and step % 4 == 0:
            print(
                f"step {step} "
                + " ".join(f"{t} {v:.4f}" for t, v in zip(TASKS, (sums / counts.clamp(min=1)).tolist())),
                flush=True,
            )
        if args.save_every and step % args.save_every == 0:
            sd, od = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                tmp = os.path.join(args.out, "writing.tmp")
                torch.save({"model": sd, "opt": od, "step": step}, tmp)
                os.replace(tmp, os.path.join(args.out, f"step_{step}.pt"))
            dist.barrier()
    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
