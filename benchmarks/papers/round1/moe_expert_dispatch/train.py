"""Token tagging with a sparse mixture of experts.

Experts are spread over the ranks (expert parallel); dense weights are sharded by FSDP2.
Sequences are packed without padding, so a rank's number of tokens changes from step to step.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, TAGS, DIM, HIDDEN = 50, 6, 24, 32
EXPERTS, LAYERS = 4, 2
SLOT_UNIT = 32
BATCH, STEPS, MAX_LEN = 16, 32, 20
LR = 5e-3


class Exchange(torch.autograd.Function):
    """all_to_all of equal chunks along dim 0; its own transpose."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, g):
        out = torch.empty_like(g)
        dist.all_to_all_single(out, g.contiguous())
        return out


class Experts(nn.Module):
    """The experts that live on this rank."""

    def __init__(self, rank, world, generator):
        super().__init__()
        local = EXPERTS // world
        w1 = torch.randn(EXPERTS, DIM, HIDDEN, generator=generator) * DIM ** -0.5
        w2 = torch.randn(EXPERTS, HIDDEN, DIM, generator=generator) * HIDDEN ** -0.5
        here = slice(rank * local, (rank + 1) * local)
        self.w1 = nn.Parameter(w1[here].clone())
        self.w2 = nn.Parameter(w2[here].clone())

    def forward(self, x):  # (local experts, tokens, dim)
        return torch.bmm(F.silu(torch.bmm(x, self.w1)), self.w2)


class MoELayer(nn.Module):
    def __init__(self, rank, world, generator):
        super().__init__()
        self.world = world
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts(rank, world, generator)

    def capacity(self, choice):
        """Slots per expert, in whole units; no token is dropped."""
        counts = torch.bincount(choice, minlength=EXPERTS)
        slots = (counts.max() + SLOT_UNIT - 1) // SLOT_UNIT * SLOT_UNIT
        dist.all_reduce(slots, op=dist.ReduceOp.MAX)
        return int(slots)

    def forward(self, x):  # (tokens, dim)
        h = self.norm(x)
        probs = self.router(h).softmax(-1)
        gate, choice = probs.max(-1)
        slots = self.capacity(choice)

        # position of a token in its expert's queue
        onehot = F.one_hot(choice, EXPERTS)
        place = (onehot.cumsum(0) * onehot).sum(-1) - 1
        address = choice * slots + place

        buffer = h.new_zeros(EXPERTS * slots, DIM).index_copy(0, address, h)
        buffer = Exchange.apply(buffer)
        local = EXPERTS // self.world
        buffer = buffer.view(self.world, local, slots, DIM).transpose(0, 1).reshape(local, -1, DIM)
        buffer = self.experts(buffer)
        buffer = buffer.view(local, self.world, slots, DIM).transpose(0, 1).reshape(-1, DIM)
        buffer = Exchange.apply(buffer)
        return x + gate.unsqueeze(-1) * buffer[address]


class Tagger(nn.Module):
    def __init__(self, rank, world, generator):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(MoELayer(rank, world, generator) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, TAGS)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def packed_batch(step, rank, world):
    g = torch.Generator().manual_seed(300 + step)
    lengths = torch.randint(6, MAX_LEN + 1, (BATCH,), generator=g)
    if step < 6:  # short warm-up sequences
        lengths = torch.full_like(lengths, 4)
    ids = torch.randint(0, VOCAB, (BATCH, MAX_LEN), generator=g)
    tags = (ids * 7 // 5) % TAGS
    n = BATCH // world
    own = range(rank * n, (rank + 1) * n)
    pack = lambda t: torch.cat([t[i, : lengths[i]] for i in own])
    return pack(ids), pack(tags), int(lengths.sum())


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(17)
    model = Tagger(rank, world, torch.Generator().manual_seed(17)).to(device)
    expert_params = [p for layer in model.layers for p in layer.experts.parameters()]
    ignored = set(expert_params)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    dense = [p for n, p in model.named_parameters() if ".experts." not in n]
    optimizer = torch.optim.AdamW(
        [{"params": dense}, {"params": expert_params}], lr=LR, weight_decay=0.0
    )

    seen = 0
    for step in range(STEPS):
        ids, tags, total = packed_batch(step, rank, world)
        logits = model(ids.to(device))
        nll = F.cross_entropy(logits, tags.to(device), reduction="sum")
        # FSDP averages over ranks; experts already hold the sum over ranks
        (nll * world / total).backward()
        for p in expert_params:
            p.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()
        seen += total

        if step % 4 == 3:
            stats = torch.stack([nll.detach(), (logits.argmax(-1).cpu() == tags).sum().to(nll)])
            dist.all_reduce(stats)
            if rank == 0:
                print(f"step {step + 1:3d} loss {stats[0].item() / total:.5f} "
                      f"acc {stats[1].item() / total:.4f} tokens {seen}", flush=True)

    model.reshard()
    norm = model.head.weight.full_tensor().norm()
    sq = sum(p.detach().square().sum() for p in expert_params)
    dist.all_reduce(sq)
    if rank == 0:
        print(f"head {norm.item():.6f} experts {sq.sqrt().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
