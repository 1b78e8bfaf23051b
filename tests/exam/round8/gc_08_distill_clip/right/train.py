"""Distils a wide frozen language model into a narrow one, with gradient accumulation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.gate, self.value, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        h = self.n1(x)
        g, v = torch.sigmoid(self.gate(h)), self.value(h)
        # running mean over the past as the token mixer
        mixed = (g * v).cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        x = x + self.out(mixed)
        return x + self.down(F.silu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self, vocab, d, n):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(n))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class TrainState(Stateful):
    def __init__(self, model, optim):
        self.model, self.optim, self.step = model, optim, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.optim)
        return {"model": m, "optim": o, "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.optim, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.step = sd["step"]


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def make_teacher(vocab):
    torch.manual_seed(100)
    teacher = LM(vocab, 64, 2)
    with torch.no_grad():
        teacher.head.weight.mul_(6.0)
    return shard(teacher.requires_grad_(False))


def micro_batch(step, index, size, vocab, length):
    """Texts of topic `index`: every source has its own vocabulary range and its own degree of repetition."""
    g = torch.Generator().manual_seed(step * 64 + index)
    lo = (index * 8) % (vocab - 16)
    ids = torch.randint(lo, lo + 16, (size, length), generator=g)
    repeat = torch.rand(size, length, generator=g) < 0.1 + 0.2 * (index % 4)
    ids[:, 1:] = torch.where(repeat[:, 1:], ids[:, :-1], ids[:, 1:])
    return ids


def distill_loss(student, teacher, ids, tau):
    with torch.no_grad():
        target = F.softmax(teacher(ids) / tau, -1)
    logp = F.log_softmax(student(ids) / tau, -1)
    return F.kl_div(logp.flatten(0, 1), target.flatten(0, 1), reduction="batchmean") * tau ** 2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--sources", type=int, default=8, help="micro-batches in one optimizer step, over all ranks")
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--clip", type=float, default=0.1)
    ap.add_argument("--tau", type=float, default=1.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    vocab, length = 64, 12
    teacher = make_teacher(vocab)
    torch.manual_seed(1)
    student = shard(LM(vocab, 32, 2))
    optim = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    state = TrainState(student, optim)
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        dcp.load({"train": state}, checkpoint_id=os.path.join(args.resume, newest))

    mine = range(rank, args.sources, world)
    while state.step < args.steps:
        total = torch.zeros(())
        for source in mine:
            ids = micro_batch(state.step, source, args.micro, vocab, length)
            loss = distill_loss(student, teacher, ids, args.tau) / len(mine)
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(student.parameters(), args.clip).full_tensor()
        optim.step()
        optim.zero_grad()
        state.step += 1
        dist.all_reduce(total)
        if rank == 0 and state.step % 5 == 0:
            print(f"step {state.step} kl {total.item() / world:.4f} grad norm {norm.item():.3f}", flush=True)
        if args.save_every and state.step % args.save_every == 0:
            dcp.save({"train": state}, checkpoint_id=os.path.join(args.out, str(state.step)))

    if args.export:
        full = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
