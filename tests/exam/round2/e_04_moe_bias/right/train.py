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


class MoE(nn.Module):
    """Top-2 experts; the balancing bias only influences the choice of experts, not their weights."""

    def __init__(self, d=16, n=4):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 24), nn.SiLU(), nn.Linear(24, d)) for _ in range(n))
        self.register_buffer("balance", torch.zeros(n))
        self.register_buffer("load", torch.zeros(n), persistent=False)

    def forward(self, x):
        score = self.gate(x).sigmoid()
        top = (score + self.balance).topk(2, dim=-1).indices
        mask = torch.zeros_like(score).scatter(-1, top, 1.0)
        if self.training:
            self.load += mask.detach().flatten(0, -2).sum(0)
        w = score * mask
        w = w / w.sum(-1, keepdim=True)
        return sum(w[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))

    @torch.no_grad()
    def rebalance(self, rate=0.05):
        load = self.load.clone()
        dist.all_reduce(load)
        self.balance += rate * torch.sign(load.mean() - load)
        self.load.zero_()


class MoELM(nn.Module):
    def __init__(self, vocab=24, d=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.mix = nn.ModuleList(nn.Conv1d(d, d, 3) for _ in range(2))
        self.moe = nn.ModuleList(MoE(d) for _ in range(2))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        for c, m in zip(self.mix, self.moe):
            x = x + c(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
            x = x + m(x)
        return self.head(x)


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
    model = MoELM()
    for m in model.moe:
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    start = load_checkpoint(args.resume, model, opt)[0] if args.resume else 0
    per = args.batch // world
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(step)
        first, stride = (
            torch.randint(0, 24, (args.batch, 1), generator=g),
            torch.randint(1, 4, (args.batch, 1), generator=g),
        )
        seq = ((first + stride * torch.arange(13)) % 24)[rank * per : (rank + 1) * per]
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        for m in model.moe:
            m.rebalance()
        if rank == 0 and step % 5 == 0:
            print(
                f"step {step} loss {loss.item():.4f} bias {[round(v, 2) for v in model.moe[0].balance.tolist()]}",
                flush=True,
            )
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt)
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
