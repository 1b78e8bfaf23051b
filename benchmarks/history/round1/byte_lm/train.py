"""Byte-level language model on a synthetic log corpus, for preemptible nodes.

    torchrun --nproc-per-node 2 train.py --ckpt /tmp/byte_lm --save-every 10
    torchrun --nproc-per-node 2 train.py --ckpt /tmp/byte_lm --resume

The scheduler announces a preemption with SIGTERM. The run then writes a
checkpoint, evaluates once and leaves; --resume goes on from there.
"""

import argparse
import logging
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB = 64
SEQ = 24
DIM = 32
HEADS = 4
DEPTH = 2
GLOBAL_BATCH = 16

log = logging.getLogger("byte_lm")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1 = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.n2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.n2(x))


class ByteLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(SEQ, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, idx):
        x = self.emb(idx) + self.pos[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus(step, split="train"):
    """The global batch of a step: noisy periodic byte strings."""
    g = torch.Generator().manual_seed((100_003 if split == "train" else 900_001) + step)
    start = torch.randint(VOCAB, (GLOBAL_BATCH, 1), generator=g)
    stride = torch.randint(1, 5, (GLOBAL_BATCH, 1), generator=g)
    text = (start + stride * torch.arange(SEQ + 1)) % VOCAB
    noise = torch.rand(text.shape, generator=g) < 0.05
    return torch.where(noise, torch.randint(VOCAB, text.shape, generator=g), text)


def my_part(batch, rank, world):
    per_rank = batch.shape[0] // world
    return batch[rank * per_rank : (rank + 1) * per_rank]


class PreemptionNotice:
    """Remembers that the scheduler asked this run to go away."""

    def __init__(self, device):
        self.device = device
        self.received = False
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum, frame):
        log.warning("received signal %d, stopping after this step", signum)
        self.received = True

    def should_stop(self):
        flag = torch.tensor([int(self.received)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def save(model, optim, step, path):
    model_sd, optim_sd = get_state_dict(model, optim)
    dcp.save({"model": model_sd, "optim": optim_sd, "step": step}, checkpoint_id=os.path.join(path, "state"))
    if dist.get_rank() == 0:
        log.info("saved step %d", step)


def load(model, optim, path):
    model_sd, optim_sd = get_state_dict(model, optim)
    state = {"model": model_sd, "optim": optim_sd, "step": 0}
    dcp.load(state, checkpoint_id=os.path.join(path, "state"))
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


@torch.no_grad()
def evaluate(model, rank, world, device):
    model.eval()
    total = torch.zeros(1, device=device)
    for i in range(4):
        tokens = my_part(corpus(i, "val"), rank, world).to(device)
        total += F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    dist.all_reduce(total)
    model.train()
    return (total / (4 * world)).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--ckpt", default=None)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--rehearse-at", type=int, default=20, help="step of the preemption rehearsal, 0 for none")
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    logging.basicConfig(level=logging.INFO, format=f"[{rank}] %(message)s")

    torch.manual_seed(7)
    model = ByteLM().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    step = load(model, optim, args.ckpt) if args.resume else 0
    notice = PreemptionNotice(device)

    while step < args.steps:
        tokens = my_part(corpus(step), rank, world).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        step += 1

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            log.info("step %d loss %.6f", step, shown.item() / world)

        # The rehearsal plays a notice that reaches the first process.
        if step == args.rehearse_at and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if notice.should_stop():
            if args.ckpt:
                save(model, optim, step, args.ckpt)
            break
        if args.ckpt and args.save_every and step % args.save_every == 0:
            save(model, optim, step, args.ckpt)

    val = evaluate(model, rank, world, device)
    if rank == 0:
        log.info("stopped at step %d, validation loss %.6f", step, val)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
