"""Fine-tunes a small encoder-decoder on few sentences and keeps the weights with the best validation loss.

The corpus is small on purpose, so the model starts to overfit after a while; training stops after `patience`
evaluations without a gain and the best weights are put back and exported.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB, LEN, DIM = 12, 5, 32


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.src = nn.Embedding(VOCAB, DIM)
        self.tgt = nn.Embedding(VOCAB + 1, DIM)
        self.enc = nn.GRU(DIM, DIM, batch_first=True)
        self.dec = nn.GRU(DIM, DIM, batch_first=True)
        self.attn = nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(2 * DIM, VOCAB)

    def forward(self, src, tgt):
        memory, h = self.enc(self.src(src))
        bos = torch.full((len(tgt), 1), VOCAB)
        y, _ = self.dec(self.tgt(torch.cat([bos, tgt[:, :-1]], 1)), h)
        w = (self.attn(y) @ memory.transpose(1, 2)).softmax(-1)
        return self.out(torch.cat([y, w @ memory], -1))


def corpus(n, seed):
    """Target: the source reversed, each word mapped by a fixed dictionary, some words replaced at random."""
    lexicon = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(0, VOCAB, (n, LEN), generator=g)
    tgt = lexicon[src.flip(1)]
    noise = torch.rand(n, LEN, generator=g) < 0.15
    return src, torch.where(noise, torch.randint(0, VOCAB, (n, LEN), generator=g), tgt)


class BestWeights:
    """Local shards of the best weights seen so far."""

    def __init__(self, patience):
        self.patience, self.value, self.bad, self.step, self.shards = patience, float("inf"), 0, 0, None

    def offer(self, value, step, model):
        if value < self.value:
            self.value, self.bad, self.step = value, 0, step
            self.shards = [p.detach().to_local().clone() for p in model.parameters()]
        else:
            self.bad += 1

    @torch.no_grad()
    def restore(self, model):
        for p, s in zip(model.parameters(), self.shards):
            p.to_local().copy_(s)


@torch.no_grad()
def validation_loss(model, data, rank, world):
    src, tgt = (t.chunk(world)[rank] for t in data)
    loss = F.cross_entropy(model(src, tgt).flatten(0, 1), tgt.flatten())
    model.reshard()
    dist.all_reduce(loss)
    return loss.item() / world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=70)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-2)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--patience", type=int, default=6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(31)
    model = Seq2Seq()
    fully_shard(model.enc)
    fully_shard(model.dec)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train, valid = corpus(192, seed=1), corpus(16, seed=2)
    best = BestWeights(args.patience)
    step = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda n: int(n.split("-")[1]))
        saved = torch.load(os.path.join(args.resume, last, f"{rank}.pt"), weights_only=False)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        best.__dict__.update(saved["best"])
        step = saved["step"]

    stop = False
    while step < args.steps and not stop:
        g = torch.Generator().manual_seed(step)
        rows = torch.randperm(192, generator=g)[: args.batch][rank::world]
        src, tgt = train[0][rows], train[1][rows]
        loss = F.cross_entropy(model(src, tgt).flatten(0, 1), tgt.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % args.eval_every == 0:
            value = validation_loss(model, valid, rank, world)
            best.offer(value, step, model)
            if rank == 0:
                print(f"step {step} train {loss.item():.4f} valid {value:.4f} best {best.value:.4f}", flush=True)
            # one decision for all ranks
            flag = torch.tensor(float(best.bad >= best.patience))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            stop = bool(flag)
        if args.save_every and step % args.save_every == 0 and not stop:
            folder = os.path.join(args.out, f"step-{step}")
            os.makedirs(folder, exist_ok=True)
            torch.save(
                {"model": model.state_dict(), "opt": opt.state_dict(), "best": best.__dict__, "step": step},
                os.path.join(folder, f"{rank}.pt"),
            )
            dist.barrier()

    best.restore(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        probe = Seq2Seq()
        probe.load_state_dict(full)
        src, tgt = valid
        final = F.cross_entropy(probe(src, tgt).flatten(0, 1), tgt.flatten()).item()
        print(f"exported weights of step {best.step}: validation loss {final:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
