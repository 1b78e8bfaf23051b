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


class GRULM(nn.Module):
    """Recurrent language model, trained with truncated back-propagation over long streams."""

    def __init__(self, vocab=12, d=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.cells = nn.ModuleList(nn.GRUCell(d, d) for _ in range(2))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, hidden):
        hidden = list(hidden.unbind(0))
        outs = []
        for x in self.emb(ids).unbind(1):
            for i, cell in enumerate(self.cells):
                hidden[i] = x = cell(x, hidden[i])
            outs.append(x)
        return self.head(torch.stack(outs, 1)), torch.stack(hidden)


def make_streams(n, length):
    # each stream has a secret stride that shows only through its history
    g = torch.Generator().manual_seed(2)
    stride = torch.randint(1, 5, (n, 1), generator=g)
    ids = torch.randint(0, 12, (n, 1), generator=g) + stride * torch.arange(length)
    return ids % 12


def gather_streams(h):
    parts = [torch.empty_like(h) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, h.contiguous())
    return torch.cat(parts, 1)


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
    bptt = 6
    n = args.batch // world
    mine = slice(rank * n, (rank + 1) * n)
    torch.manual_seed(0)
    model = GRULM()
    for c in model.cells:
        fully_shard(c, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    streams = make_streams(args.batch, args.steps * bptt + 1)[mine]
    hidden = torch.zeros(2, n, 16)
    start = 0
    if args.resume:
        start, extra = load_checkpoint(args.resume, model, opt)
        if "hidden" in extra:
            hidden = extra["hidden"][:, mine].clone()
        if rank == 0:
            print("resumed at step", start, flush=True)
    for step in range(start, args.steps):
        chunk = streams[:, step * bptt : (step + 1) * bptt + 1]
        logits, hidden = model(chunk[:, :-1], hidden.detach())
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt, {"hidden": gather_streams(hidden.detach())})
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
