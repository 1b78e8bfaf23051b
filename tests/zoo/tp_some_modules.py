"""Tensor parallelism in the MLPs only, FSDP over the data dimension; embedding, norms and head are whole on each tensor rank.

nproc: 4
single_args: --tp 1
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, SEQ, WIDTH, LAYERS = 32, 12, 32, 2
GLOBAL_BATCH, SAMPLES, STEPS = 16, 512, 20


class GatedMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(GatedMLP(WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_sequences(samples, seed=0):
    """Token sequences where the next token is 5 * token + 3 plus one random bit, modulo the vocabulary."""
    gen = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(SEQ):
        bit = torch.randint(0, 2, (samples,), generator=gen)
        tokens.append((5 * tokens[-1] + 3 + bit) % VOCAB)
    return torch.stack(tokens, dim=1)


def parallelize(model, mesh):
    for layer in model.layers:
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


@torch.no_grad()
def clip(params, max_norm):
    """`clip_grad_norm_` takes tensors of one mesh, so the norms of each mesh are combined."""
    by_mesh = {}
    for param in params:
        by_mesh.setdefault(param.grad.device_mesh, []).append(param.grad)
    norms = [torch.nn.utils.get_total_norm(grads).full_tensor() for grads in by_mesh.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for param in params:
        param.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    tp = min(options.tp, world)
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    replica, replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
    torch.manual_seed(1)
    model = Decoder()
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    tokens = make_sequences(SAMPLES)
    rows = GLOBAL_BATCH // replicas
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES
        batch = tokens[start : start + GLOBAL_BATCH][replica * rows : (replica + 1) * rows]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip(list(model.parameters()), 0.5)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
