"""Click prediction on tabular features with a small Shampoo optimizer and HSDP2."""
import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

logger = logging.getLogger("shampoo_example")


class Shampoo(torch.optim.Optimizer):
    """Kronecker-factored preconditioning for matrices, Adagrad for vectors.

    The factors are kept for whole (unsharded) matrices; every rank computes the direction
    of the whole matrix and applies its own shard.
    """

    def __init__(self, params, lr=1e-2, beta1=0.9, beta2=0.99, epsilon=1e-3,
                 precondition_frequency=4, start_preconditioning_step=4, weight_decay=0.0):
        defaults = dict(lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay,
                        precondition_frequency=precondition_frequency,
                        start_preconditioning_step=start_preconditioning_step)
        super().__init__(params, defaults)

    @staticmethod
    def _inverse_root(factor, epsilon, root):
        values, vectors = torch.linalg.eigh(factor.double())
        values = values.clamp_min(0.0) + epsilon * values.max().clamp_min(1e-12)
        return ((vectors * values.pow(-1.0 / root)) @ vectors.T).to(factor.dtype)

    def _init_state(self, state, grad):
        state["step"] = 0
        state["momentum"] = torch.zeros_like(grad)
        state["sum"] = torch.zeros_like(grad)
        if grad.dim() == 2:
            state["factors"] = [torch.zeros(n, n, dtype=grad.dtype, device=grad.device) for n in grad.shape]
            state["inverse_roots"] = None

    def _direction(self, state, group, grad):
        state["step"] += 1
        state["sum"].mul_(group["beta2"]).addcmul_(grad, grad, value=1 - group["beta2"])
        correction = 1 - group["beta2"] ** state["step"]
        grafted = grad / ((state["sum"] / correction).sqrt() + 1e-6)
        if grad.dim() != 2:
            return grafted
        left, right = state["factors"]
        left.mul_(group["beta2"]).add_(grad @ grad.T, alpha=1 - group["beta2"])
        right.mul_(group["beta2"]).add_(grad.T @ grad, alpha=1 - group["beta2"])
        if state["step"] < group["start_preconditioning_step"]:
            return grafted
        if state["inverse_roots"] is None or state["step"] % group["precondition_frequency"] == 0:
            state["inverse_roots"] = [self._inverse_root(f, group["epsilon"], 4) for f in state["factors"]]
        left_root, right_root = state["inverse_roots"]
        direction = left_root @ grad @ right_root
        return direction * (grafted.norm() / direction.norm().clamp_min(1e-12))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                state = self.state[p]
                if not state:
                    self._init_state(state, grad)
                state["momentum"].lerp_(self._direction(state, group, grad), 1 - group["beta1"])
                update = state["momentum"] / (1 - group["beta1"] ** state["step"])
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(update, alpha=group["lr"])


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class ClickModel(nn.Module):
    def __init__(self, dense=12, fields=4, cardinality=20, width=24, depth=2):
        super().__init__()
        self.dense = nn.Linear(dense, width)
        self.tables = nn.ModuleList(nn.Embedding(cardinality, width) for _ in range(fields))
        self.towers = nn.ModuleList(Tower(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, dense, sparse):
        x = self.dense(dense)
        for i, table in enumerate(self.tables):
            x = x + table(sparse[:, i])
        for tower in self.towers:
            x = tower(x)
        return self.head(x).squeeze(-1)


class Impressions:
    def __init__(self, size, seed, dense=12, fields=4, cardinality=20):
        truth = torch.Generator().manual_seed(5)
        w = torch.randn(dense, generator=truth)
        table = torch.randn(fields, cardinality, generator=truth)
        g = torch.Generator().manual_seed(seed)
        self.dense = torch.randn(size, dense, generator=g)
        self.sparse = torch.randint(cardinality, (size, fields), generator=g)
        logit = torch.tanh(self.dense) @ w + sum(table[f, self.sparse[:, f]] for f in range(fields))
        self.click = (torch.rand(size, generator=g) < torch.sigmoid(logit)).float()

    def batches(self, batch_size, epoch, rank, world):
        order = torch.randperm(len(self.click), generator=torch.Generator().manual_seed(epoch))
        for chunk in order.split(batch_size):
            mine = chunk[rank::world]
            yield self.dense[mine], self.sparse[mine], self.click[mine]


@torch.no_grad()
def normalized_entropy(model, data, device, rank, world):
    dense, sparse, click = (t[rank::world].to(device) for t in (data.dense, data.sparse, data.click))
    total = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), click, reduction="sum")
    dist.all_reduce(total)
    ctr = data.click.mean()
    base = -(ctr * ctr.log() + (1 - ctr) * (1 - ctr).log())
    return (total.item() / len(data.click)) / base.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--precondition-frequency", type=int, default=4)
    parser.add_argument("--start-preconditioning-step", type=int, default=4)
    parser.add_argument("--weight-decay", type=float, default=1e-3)
    parser.add_argument("--dp-replicate-degree", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    mesh = init_device_mesh(
        device.type,
        (args.dp_replicate_degree, world // args.dp_replicate_degree),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )

    torch.manual_seed(args.seed)
    model = ClickModel().to(device)
    for tower in model.towers:
        fully_shard(tower, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Shampoo(
        model.parameters(), lr=args.lr, weight_decay=args.weight_decay,
        precondition_frequency=args.precondition_frequency,
        start_preconditioning_step=args.start_preconditioning_step,
    )

    train, test = Impressions(1024, seed=1), Impressions(512, seed=2)
    for epoch in range(args.epochs):
        running = torch.zeros((), device=device)
        for step, (dense, sparse, click) in enumerate(train.batches(args.batch_size, epoch, rank, world), 1):
            optimizer.zero_grad()
            logits = model(dense.to(device), sparse.to(device))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, click.to(device))
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running)
        entropy = normalized_entropy(model, test, device, rank, world)
        if rank == 0:
            logger.info(f"epoch {epoch} steps {step} train loss {running.item() / world / step:.6f} "
                        f"test normalized entropy {entropy:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
