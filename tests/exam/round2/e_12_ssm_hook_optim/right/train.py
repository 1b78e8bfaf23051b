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


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)
    dist.barrier()


class SSMLayer(nn.Module):
    """Diagonal linear state-space layer."""

    def __init__(self, d):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-1, 3, d))
        self.inp, self.out = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        a = self.decay.sigmoid()
        u, h, hs = self.inp(x), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = a * h + (1 - a) * u[:, t]
            hs.append(h)
        return x + self.out(F.silu(torch.stack(hs, 1)))


class SSM(nn.Module):
    def __init__(self, vocab=20, d=16):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.layers = nn.ModuleList(SSMLayer(d) for _ in range(2))

    def forward(self, ids):
        x = self.emb(ids)
        for l in self.layers:
            x = l(x)
        return self.head(x)


def install_updates(model, lr):
    """One small optimizer per parameter, run as soon as its reduced gradient is there; the gradient is freed at once."""
    optims = {}
    for name, p in model.named_parameters():
        optims[name] = torch.optim.AdamW([p], lr=lr)

        def update(param, opt=optims[name]):
            opt.step()
            opt.zero_grad()

        p.register_post_accumulate_grad_hook(update)
    return optims


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
    model = SSM()
    for l in model.layers:
        fully_shard(l, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optims = install_updates(model, args.lr)
    start = 0
    if args.resume:
        done = sorted(d for d in os.listdir(args.resume) if os.path.exists(os.path.join(args.resume, d, "COMPLETE")))
        if done:
            ck = torch.load(os.path.join(args.resume, done[-1], f"rank{rank}.pt"), weights_only=False)
            model.load_state_dict(ck["model"])
            for name, o in optims.items():
                o.load_state_dict(ck["optims"][name])
            start = ck["step"]
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(step)
        first = torch.randint(0, 20, (args.batch, 1), generator=g)
        seq = ((first + 3 * torch.arange(11)) % 20)[rank::world]
        lr = args.lr * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for o in optims.values():
            o.param_groups[0]["lr"] = lr
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        loss.backward()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            path = os.path.join(args.out, f"s{step + 1:05d}")
            os.makedirs(path, exist_ok=True)
            state = {
                "model": model.state_dict(),
                "optims": {k: o.state_dict() for k, o in optims.items()},
                "step": step + 1,
            }
            torch.save(state, os.path.join(path, f"rank{rank}.pt"))
            dist.barrier()
            if rank == 0:
                open(os.path.join(path, "COMPLETE"), "w").close()
            dist.barrier()
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
