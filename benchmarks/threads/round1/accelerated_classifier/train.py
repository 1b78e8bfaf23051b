"""Image classifier on a thin accelerator layer (single process, DDP-style, FSDP2)."""
import argparse
import enum
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class DistributedType(enum.Enum):
    NO = "no"
    MULTI = "multi"
    FSDP = "fsdp"


class Accelerator:
    def __init__(self, fsdp=True):
        self.cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.num_processes = dist.get_rank(), dist.get_world_size()
        if fsdp:
            self.distributed_type = DistributedType.FSDP
        else:
            self.distributed_type = DistributedType.MULTI if self.num_processes > 1 else DistributedType.NO
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.models = []

    def prepare(self, model, wrap):
        model.to(self.device)
        if self.distributed_type is DistributedType.FSDP:
            mesh = init_device_mesh(self.device.type, (self.num_processes,))
            for module in model.modules():
                if isinstance(module, wrap):
                    fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.models.append(model)
        return model

    def local(self, *tensors):
        """This process's part of a global batch."""
        n = tensors[0].size(0) // self.num_processes
        return [t[self.rank * n : (self.rank + 1) * n].to(self.device) for t in tensors]

    def backward(self, loss):
        loss.backward()
        if self.distributed_type is DistributedType.MULTI:
            for p in (p for m in self.models for p in m.parameters() if p.grad is not None):
                dist.all_reduce(p.grad)
                p.grad /= self.num_processes

    def gather(self, tensor):
        """The tensors of all processes, concatenated along the first dimension."""
        if tensor.ndim == 0:
            tensor = tensor[None]
        if self.distributed_type in (DistributedType.MULTI, DistributedType.FSDP):
            parts = [torch.empty_like(tensor) for _ in range(self.num_processes)]
            dist.all_gather(parts, tensor.contiguous())
            return torch.cat(parts)
        return tensor

    def print(self, *args):
        if self.rank == 0:
            print(*args, flush=True)

    def end(self):
        dist.barrier()
        dist.destroy_process_group()


class ResUnit(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.norm = nn.GroupNorm(2, ch)
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(self.norm(x))))


class SmallResNet(nn.Module):
    def __init__(self, classes, ch=12, depth=2):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.units = nn.ModuleList(ResUnit(ch) for _ in range(depth))
        self.fc = nn.Linear(ch * 4, classes)

    def forward(self, x):
        h = self.stem(x)
        for unit in self.units:
            h = unit(h)
        return self.fc(F.adaptive_avg_pool2d(F.relu(h), 2).flatten(1))


def images(seed, n, classes):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(classes, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.randint(classes, (n,), generator=g)
    return proto[y] + 1.1 * torch.randn(n, 1, 8, 8, generator=g), y


@torch.no_grad()
def evaluate(acc, model, batches, classes):
    model.eval()
    predictions, references, losses = [], [], []
    for x, y in batches:
        x, y = acc.local(x, y)
        logits = model(x)
        losses.append(acc.gather(F.cross_entropy(logits, y)))
        predictions.append(acc.gather(logits.argmax(-1)))
        references.append(acc.gather(y))
    model.train()
    predictions, references = torch.cat(predictions), torch.cat(references)
    return {
        "loss": round(torch.cat(losses).mean().item(), 6),
        "accuracy": round((predictions == references).float().mean().item(), 4),
        "samples": len(references),
    }


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--steps", type=int, default=5)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--classes", type=int, default=6)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--fsdp", action=argparse.BooleanOptionalAction, default=True)
    args = ap.parse_args()

    acc = Accelerator(fsdp=args.fsdp)
    torch.manual_seed(90)
    model = acc.prepare(SmallResNet(args.classes), ResUnit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    held_out = [images(50_000 + i, args.batch, args.classes) for i in range(2)]
    for epoch in range(args.epochs):
        for i in range(args.steps):
            x, y = acc.local(*images(epoch * args.steps + i, args.batch, args.classes))
            loss = F.cross_entropy(model(x), y)
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            shown = loss.detach() / acc.num_processes
            dist.all_reduce(shown)
            acc.print(f"epoch {epoch} step {i} loss {shown.item():.6f}")
        acc.print(f"epoch {epoch} eval {evaluate(acc, model, held_out, args.classes)}")
    acc.end()


if __name__ == "__main__":
    main()
