"""Regression with a residual MLP; a dry run reports the activation sizes first.

rule: optim-built-after-forward
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, DEPTH = 8, 24, 3
GLOBAL_BATCH, SAMPLES, STEPS = 32, 1024, 20


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Regressor(nn.Module):
    def __init__(self, inputs=FEATURES, width=WIDTH, depth=DEPTH):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def make_dataset():
    gen = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, FEATURES, generator=gen)
    direction = torch.randn(FEATURES, generator=gen)
    y = torch.sin(x @ direction) + x[:, :4].sum(dim=1)
    return x, y[:, None]


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def report_activations(model):
    """Run the model once on dummy data and print the size of each layer's output."""
    sizes = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: sizes.append(out.numel())) for layer in model.layers]
    with torch.no_grad():
        model(torch.zeros(1, FEATURES))
    for hook in hooks:
        hook.remove()
    if dist.get_rank() == 0:
        print(f"activations per sample: {sum(sizes)}", flush=True)


def build_optimizer(model):
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 1e-3}, {"params": biases}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = shard(Regressor(), init_device_mesh("cpu", (world,)))
    report_activations(model)
    optimizer = build_optimizer(model)

    x, y = make_dataset()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        index = torch.arange(local) + step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.mse_loss(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
