"""Tensor parallelism over pairs of ranks, FSDP over the rest; the ranks of a pair read the same rows. It can save and resume.

nproc: 4
save_args: --checkpoint {checkpoint} --save-at 3
resume_args: --checkpoint {checkpoint} --resume
single_args: --tp 1
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
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
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--checkpoint")
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--resume", action="store_true")
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
    first = 0
    if options.resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=options.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]
    rows = GLOBAL_BATCH // replicas
    for step in range(first, STEPS):
        start = step * GLOBAL_BATCH % SAMPLES
        batch = tokens[start : start + GLOBAL_BATCH][replica * rows : (replica + 1) * rows]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        if options.save_at == step + 1:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step + 1}
            dcp.save(state, checkpoint_id=options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
