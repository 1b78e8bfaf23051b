import argparse
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import ckpt
from corpus import PAD, batches, build_pairs, collate
from seq2seq import Shape, Translator


def build(shape, seed):
    with torch.device("meta"):
        model = Translator(shape)
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(seed)
    model.init_weights()
    return model


def shard(model):
    for layer in [*model.encoder, *model.decoder]:
        fully_shard(layer)
    return fully_shard(model)


def lr_at(step, peak, warmup):
    return peak * min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def main(a):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = Shape()
    model = shard(build(shape, seed=3))
    opt = torch.optim.Adam(model.parameters(), lr=a.lr, betas=(0.9, 0.98), eps=1e-8)
    pairs = build_pairs(240, shape.vocab, 6, seed=17)
    start = ckpt.load(a.resume, model, opt) if a.resume else 0

    for step, batch in enumerate(islice(batches(pairs, a.batch, seed=2), start, a.steps), start):
        src, tgt = collate(batch)
        n_tok = (tgt[:, 1:] != PAD).sum()
        src, tgt = src[rank::world], tgt[rank::world]
        logits = model(src, tgt[:, :-1], src == PAD)
        loss = F.cross_entropy(
            logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1, reduction="sum"
        )
        (loss / n_tok * world).backward()
        for group in opt.param_groups:
            group["lr"] = lr_at(step, a.lr, a.warmup)
        opt.step()
        opt.zero_grad(set_to_none=True)

        shown = loss.detach() / n_tok
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 4:
            print(f"{step + 1:4d}  smoothed nll {shown:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0 and step + 1 < a.steps:
            ckpt.save(a.out, step + 1, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=6e-3)
    p.add_argument("--warmup", type=int, default=8)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out")
    p.add_argument("--resume")
    main(p.parse_args())
