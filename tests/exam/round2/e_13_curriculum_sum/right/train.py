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


class Net(nn.Module):
    def __init__(self, vocab=18, d=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.convs = nn.ModuleList(nn.Conv1d(d, d, 3) for _ in range(2))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        for c in self.convs:
            x = x + torch.tanh(c(F.pad(x, (2, 0))))
        return self.head(x.transpose(1, 2))


def curriculum(start, total, batch, rank, world):
    """The sentences grow with the step; lengths vary inside a batch, so ranks hold different numbers of tokens."""
    for step in range(start, total):
        longest = 4 + 8 * step // total
        g = torch.Generator().manual_seed(500 + step)
        first, lens = (
            torch.randint(0, 18, (batch, 1), generator=g),
            torch.randint(3, longest + 1, (batch,), generator=g),
        )
        seq = (first + 5 * torch.arange(longest + 1)) % 18
        labels = seq[:, 1:].masked_fill(torch.arange(longest) >= lens[:, None], -100)
        yield step, seq[rank::world, :-1], labels[rank::world]


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
    torch.manual_seed(0)
    model = Net()
    for c in model.convs:
        fully_shard(c, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for m in (*model.convs, model):
        m.set_gradient_divide_factor(1.0)
        m.set_force_sum_reduction_for_comms(True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    start = load_dcp(args.resume, model, opt, {})[0] if args.resume else 0
    for step, ids, labels in curriculum(start, args.steps, args.batch, rank, world):
        for x, y in zip(ids.split(1), labels.split(1)):
            F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum").backward()
        tokens = (labels != -100).sum().float()
        dist.all_reduce(tokens)
        # gradients are sums over ranks and sentences: divide once by the number of tokens of the whole batch
        for p in model.parameters():
            p.grad.div_(tokens)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        opt.zero_grad()
        if step % 5 == 0:
            with torch.no_grad():
                total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            dist.all_reduce(total)
            if rank == 0:
                print(
                    f"step {step} loss {(total / tokens).item():.4f} norm {norm.item():.3f} tokens {int(tokens)}",
                    flush=True,
                )
        if args.save_every and (step + 1) % args.save_every == 0:
            save_dcp(args.out, step + 1, model, opt, {})
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
