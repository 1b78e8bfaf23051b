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


class Forecaster(nn.Module):
    """Speech-like frames in, class of the hidden tone out."""

    def __init__(self, d, layers):
        super().__init__()
        self.inp, self.out = nn.Linear(4, d), nn.Linear(d, 4)
        self.layers = nn.ModuleList(nn.Linear(2 * d, d) for _ in range(layers))

    def forward(self, frames):
        x = self.inp(frames)
        for l in self.layers:
            x = x + torch.tanh(l(torch.cat([x, x.roll(1, 1)], -1)))
        return self.out(x.mean(1))


def frames_for(step, n, rank, world):
    g = torch.Generator().manual_seed(700 + step)
    tone = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(48).view(1, 48)
    wave = torch.sin(t * 0.3 * (tone[:, None] + 1) + torch.rand(n, 1, generator=g)) + 0.2 * torch.randn(
        n, 48, generator=g
    )
    return wave.view(n, 12, 4)[rank::world], tone[rank::world]


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
    args.batch *= 2
    torch.manual_seed(0)
    peers = nn.ModuleDict({"wide": Forecaster(20, 1), "deep": Forecaster(12, 3)})
    for net in peers.values():
        for l in net.layers:
            fully_shard(l, mesh=mesh)
        fully_shard(net, mesh=mesh)
    opts = {
        "wide": torch.optim.AdamW(peers["wide"].parameters(), lr=args.lr),
        "deep": torch.optim.SGD(peers["deep"].parameters(), lr=args.lr * 5, momentum=0.9),
    }
    start = 0
    if args.resume:
        found = sorted(f for f in os.listdir(args.resume) if f.startswith("pair_") and f.endswith(".pt"))
        if found:
            ck = torch.load(os.path.join(args.resume, found[-1]), weights_only=False)
            start = ck["step"]
            for k in peers:
                set_state_dict(
                    peers[k],
                    opts[k],
                    model_state_dict=ck[k][0],
                    optim_state_dict=ck[k][1],
                    options=StateDictOptions(full_state_dict=True),
                )
    for step in range(start, args.steps):
        x, y = frames_for(step, args.batch, rank, world)
        me, other = ("wide", "deep") if step % 2 == 0 else ("deep", "wide")
        with torch.no_grad():
            soft = peers[other](x).softmax(-1)
        # the peers take turns: one learns, the other gives soft labels
        out = peers[me](x)
        loss = F.cross_entropy(out, y) + 0.5 * F.kl_div(out.log_softmax(-1), soft, reduction="batchmean")
        opts[me].zero_grad()
        loss.backward()
        opts[me].step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} {me} loss {loss.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            full = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = {k: get_state_dict(peers[k], opts[k], options=full) for k in peers}
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({**state, "step": step + 1}, os.path.join(args.out, "writing.part"))
                os.replace(os.path.join(args.out, "writing.part"), os.path.join(args.out, f"pair_{step + 1:05d}.pt"))
            dist.barrier()
    if args.export:
        export(peers, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
