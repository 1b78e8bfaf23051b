"""Traffic model on a road graph with a batch that grows with the measured gradient noise scale.

One update sums a number of chunks of CHUNK samples of the whole job. The square norm of each chunk's gradient and that of their
mean give an estimate of the noise scale (McCandlish et al.); its running value decides how many chunks the next update takes."""
import argparse
import os
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

NODES, HISTORY, CHUNK, UPDATES = 20, 6, 4, 16
BATCH_PER_SCALE = 12            # the batch follows this many times the noise scale


class GraphGRU(nn.Module):
    def __init__(self, adj, dim=24):
        super().__init__()
        self.register_buffer("adj", adj)
        self.gates = nn.Linear(2 * (dim + 1), 2 * dim)
        self.cand = nn.Linear(2 * (dim + 1), dim)
        self.read = nn.Linear(dim, 1)
        self.dim = dim

    def mix(self, x):
        return torch.cat([x, self.adj @ x], -1)

    def forward(self, x):                       # samples, time, nodes
        h = x.new_zeros(x.shape[0], NODES, self.dim)
        for t in range(x.shape[1]):
            v = x[:, t, :, None]
            z, r = torch.sigmoid(self.gates(self.mix(torch.cat([v, h], -1)))).chunk(2, -1)
            c = torch.tanh(self.cand(self.mix(torch.cat([v, r * h], -1))))
            h = (1 - z) * h + z * c
        return self.read(h).sum(-1)


@dataclass
class Progress:
    update: int = 0
    drawn: int = 0                # samples taken from the stream so far
    chunks: int = 2
    signal: float = 0.0           # running estimates of |G|^2 and of the trace of the noise
    noise: float = 0.0
    history: list = field(default_factory=list)


def make_traffic(length=500):
    g = torch.Generator().manual_seed(30)
    place = torch.rand(NODES, 2, generator=g)
    adj = torch.exp(-torch.cdist(place, place) ** 2 / 0.05)
    adj = adj / adj.sum(1, keepdim=True)
    flow = [torch.randn(NODES, generator=g)]
    for t in range(length - 1):
        wave = torch.sin(torch.tensor(6.283 * t / 24) + 4 * place[:, 0])
        flow.append(0.7 * adj @ flow[-1] + 0.5 * wave + 0.3 * torch.randn(NODES, generator=g))
    return torch.stack(flow), adj


def square_norm(grads):
    total = 0.0
    for g in grads:
        n = torch.linalg.vector_norm(g.double()) ** 2 if not isinstance(g, DTensor) else \
            torch.linalg.vector_norm(g).full_tensor().double() ** 2
        total += n.item()
    return total


def newest(root):
    return os.path.join(root, max(os.listdir(root), key=lambda d: int(d.removeprefix("update"))))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    flow, adj = make_traffic()
    torch.manual_seed(10)
    model = GraphGRU(adj)
    fully_shard(model)
    params = dict(model.named_parameters())
    velocity = {n: torch.zeros_like(p) for n, p in params.items()}
    progress = Progress()

    if args.resume:
        folder = newest(args.resume)
        tensors = {"model": model.state_dict(), "velocity": velocity}
        dcp.load(tensors, checkpoint_id=folder)
        model.load_state_dict(tensors["model"])
        progress = Progress(**torch.load(os.path.join(folder, "progress.pt")))

    def chunk_gradient():
        """Mean gradient over the next CHUNK samples of the stream, which are divided over the ranks."""
        ids = torch.arange(progress.drawn, progress.drawn + CHUNK).tensor_split(world)[rank]
        progress.drawn += CHUNK
        start = torch.stack([torch.randint(len(flow) - HISTORY - 1, (), generator=torch.Generator().manual_seed(int(i))) for i in ids])
        x = flow[start[:, None] + torch.arange(HISTORY)]
        loss = F.mse_loss(model(x), flow[start + HISTORY])
        loss.backward()
        grads = {n: p.grad for n, p in params.items()}
        for p in params.values():
            p.grad = None
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return grads, loss.item() / world

    while progress.update < UPDATES:
        total, losses, small = None, [], 0.0
        for _ in range(progress.chunks):
            grads, loss = chunk_gradient()
            losses.append(loss)
            small += square_norm(grads.values()) / progress.chunks
            total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
        mean = {n: g / progress.chunks for n, g in total.items()}
        big = square_norm(mean.values())

        # unbiased estimates from the two batch sizes
        b, B = CHUNK, CHUNK * progress.chunks
        signal = (B * big - b * small) / (B - b)
        noise = (small - big) / (1 / b - 1 / B)
        progress.signal = 0.8 * progress.signal + 0.2 * signal
        progress.noise = 0.8 * progress.noise + 0.2 * noise

        with torch.no_grad():
            for n, p in params.items():
                velocity[n].mul_(0.8).add_(mean[n])
                p.add_(velocity[n], alpha=-0.05)
        scale = progress.noise / max(progress.signal, 1e-8)
        progress.history.append(progress.chunks)
        if B < BATCH_PER_SCALE * scale and progress.chunks < 8:
            progress.chunks += 1
        progress.update += 1
        if rank == 0 and progress.update % 4 == 0:
            print(f"update {progress.update} loss {sum(losses) / len(losses):.4f} chunks {progress.chunks} noise scale {scale:.1f}", flush=True)
        if args.save_every and progress.update % args.save_every == 0:
            folder = os.path.join(args.out, f"update{progress.update}")
            dcp.save({"model": model.state_dict(), "velocity": velocity}, checkpoint_id=folder)
            if rank == 0:
                torch.save(asdict(progress), os.path.join(folder, "progress.pt"))
            dist.barrier()

    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
