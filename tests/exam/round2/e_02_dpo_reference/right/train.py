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


class TinyLM(nn.Module):
    """Causal convolutional language model."""

    def __init__(self, vocab=20, d=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.convs = nn.ModuleList(nn.Conv1d(d, d, 3) for _ in range(2))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        for c in self.convs:
            x = x + torch.tanh(c(F.pad(x, (2, 0))))
        return self.head(x.transpose(1, 2))


def shard(model, mesh):
    for c in model.convs:
        fully_shard(c, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_reference(policy, mesh):
    ref = TinyLM()
    full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True))
    ref.load_state_dict(full)
    ref.requires_grad_(False)
    return shard(ref, mesh).eval()


def logp(model, ids):
    lp = model(ids[:, :-1]).log_softmax(-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)


def make_pairs(n=64, t=10):
    g = torch.Generator().manual_seed(5)
    start = torch.randint(0, 20, (n, 1), generator=g)
    chosen = (start + torch.arange(t)) % 20
    rejected = torch.where(torch.rand(n, t, generator=g) < 0.4, torch.randint(0, 20, (n, t), generator=g), chosen)
    return chosen, rejected


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    beta = 0.3
    torch.manual_seed(11)
    policy = shard(TinyLM(), mesh)
    opt = torch.optim.Adam(policy.parameters(), lr=args.lr)
    ref = make_reference(policy, mesh)
    start = 0
    if args.resume:
        start, _ = load_checkpoint(args.resume, policy, opt)
    chosen, rejected = make_pairs()
    for step in range(start, args.steps):
        idx = torch.randperm(64, generator=torch.Generator().manual_seed(step))[: args.batch][rank::world]
        c, r = chosen[idx], rejected[idx]
        with torch.no_grad():
            ref_c, ref_r = logp(ref, c), logp(ref, r)
        margin = (logp(policy, c) - ref_c) - (logp(policy, r) - ref_r)
        loss = -F.logsigmoid(beta * margin).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 3 == 0:
            acc = (margin > 0).float().mean()
            dist.all_reduce(acc)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} pref-acc {acc.item() / world:.2f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, policy, opt)
    if args.export:
        export(policy, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
