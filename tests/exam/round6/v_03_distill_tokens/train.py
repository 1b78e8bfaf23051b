"""Distils a wide language model into a narrow one on sequences of varying length (FSDP2)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB, LONGEST = 24, 20


class GRULM(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(nn.GRU(dim, dim, batch_first=True) for _ in range(layers))
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.out(x)


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


class Corpus:
    """A noisy Markov chain; about one sequence in four is long."""

    def __init__(self, seed=17):
        g = torch.Generator().manual_seed(seed)
        self.chain = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, generator=g), -1)

    def batch(self, step, size):
        g = torch.Generator().manual_seed(10_000 + step)
        seqs = [torch.randint(VOCAB, (size,), generator=g)]
        for _ in range(LONGEST):
            seqs.append(torch.multinomial(self.chain[seqs[-1]], 1, generator=g).squeeze(1))
        tokens = torch.stack(seqs, 1)
        short = torch.randint(3, 8, (size,), generator=g)
        long = torch.rand(size, generator=g) < 0.25
        lengths = torch.where(long, torch.tensor(LONGEST), short)
        mask = torch.arange(LONGEST)[None] < lengths[:, None]
        return tokens[:, :-1], tokens[:, 1:], mask


def warm_up_teacher(teacher, corpus, steps=25):
    opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for s in range(steps):
        x, y, mask = corpus.batch(-1 - s, 16)
        loss = F.cross_entropy(teacher(x)[mask], y[mask])
        opt.zero_grad()
        loss.backward()
        opt.step()
    teacher.requires_grad_(False).eval()


def newest(folder):
    return os.path.join(folder, sorted(os.listdir(folder))[-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=16, help="sequences over all ranks")
    ap.add_argument("--alpha", type=float, default=0.5, help="weight of the distillation term")
    ap.add_argument("--temperature", type=float, default=2.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    corpus = Corpus()
    teacher = GRULM(48, 2)
    warm_up_teacher(teacher, corpus)
    student = GRULM(16, 2)
    shard(teacher)
    shard(student)
    opt = torch.optim.SGD(student.parameters(), lr=0.3, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps, eta_min=0.03)

    step = 0
    if args.resume:
        m, o = get_state_dict(student, opt)
        state = {"student": m, "opt": o, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(student, opt, model_state_dict=state["student"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        step = state["step"]

    local = args.batch // world
    T = args.temperature
    while step < args.steps:
        x, y, mask = (t[rank * local : (rank + 1) * local] for t in corpus.batch(step, args.batch))
        n_tok = mask.sum()
        dist.all_reduce(n_tok)

        logits = student(x)[mask]
        with torch.no_grad():
            target = teacher(x)[mask]
        ce = F.cross_entropy(logits, y[mask], reduction="sum") / n_tok
        kd = F.kl_div((logits / T).log_softmax(-1), (target / T).softmax(-1), reduction="sum") / n_tok
        # gradients are averaged over the ranks, the sums above are parts of a global mean
        loss = world * ((1 - args.alpha) * ce + args.alpha * T * T * kd)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        step += 1

        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(student, opt)
            state = {"student": m, "opt": o, "sched": sched.state_dict(), "step": step}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"{step:05d}"))

    if args.export:
        full = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
