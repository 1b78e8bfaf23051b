"""Direct preference optimisation of a small conditional sequence model."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH, N_PAIRS = 16, 6, 256


class TinyLM(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.pos = nn.Embedding(LENGTH, width)
        self.mix = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        """Sum of log p(token t | tokens before t) for t >= 1, one number per sequence."""
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        past = torch.cumsum(x, dim=1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        x = x + past
        for m in self.mix:
            x = x + m(x)
        logp = self.head(x[:, :-1]).log_softmax(-1)
        return logp.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)


def preference_data():
    """The answer that climbs the hidden bigram table more is the chosen one."""
    g = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB, VOCAB, generator=g)
    a = torch.randint(0, VOCAB, (N_PAIRS, LENGTH), generator=g)
    b = torch.randint(0, VOCAB, (N_PAIRS, LENGTH), generator=g)
    b[:, 0] = a[:, 0]
    score = lambda s: table[s[:, :-1], s[:, 1:]].sum(1)
    swap = score(b) > score(a)
    chosen, rejected = torch.where(swap[:, None], b, a), torch.where(swap[:, None], a, b)
    return chosen, rejected


def wrap(model):
    for m in model.mix:
        fully_shard(m)
    return fully_shard(model)


def batch_indices(step, size):
    per_epoch = N_PAIRS // size
    g = torch.Generator().manual_seed(1000 + step // per_epoch)
    order = torch.randperm(N_PAIRS, generator=g)
    at = (step % per_epoch) * size
    return order[at : at + size]


def resume(folder, model, optim):
    path = sorted(glob.glob(os.path.join(folder, "dpo-*")))[-1]
    m, o = get_state_dict(model, optim)
    state = {"model": m, "optim": o, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


def save(folder, step, model, optim):
    m, o = get_state_dict(model, optim)
    dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=os.path.join(folder, f"dpo-{step:06d}"))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--beta", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(11)
    policy = wrap(TinyLM())
    reference = wrap(TinyLM()).requires_grad_(False).eval()
    optim = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01, eps=1e-6)

    start = 0
    reference.load_state_dict(policy.state_dict())
    if args.resume:
        start = resume(args.resume, policy, optim)

    chosen, rejected = preference_data()
    for step in range(start, args.steps):
        idx = batch_indices(step, args.batch)[rank::world]
        both = torch.cat([chosen[idx], rejected[idx]])
        with torch.no_grad():
            ref_c, ref_r = reference(both).chunk(2)
        pol_c, pol_r = policy(both).chunk(2)
        margin = args.beta * ((pol_c - ref_c) - (pol_r - ref_r))
        loss = -F.logsigmoid(margin).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optim.step()
        optim.zero_grad()

        stats = torch.stack([loss.detach(), (margin > 0).float().mean()])
        dist.all_reduce(stats, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step:3d} dpo loss {stats[0] / world:.4f} accuracy {stats[1] / world:.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, policy, optim)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
