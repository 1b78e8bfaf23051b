import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import ckpt
from lamb import Lamb
from net import TinyLM


def batch_for(step, size, rank, world, vocab=16, ctx=12):
    """Arithmetic sequences modulo the vocabulary: start and stride are random."""
    g = torch.Generator().manual_seed(100 + step)
    start = torch.randint(vocab, (size, 1), generator=g)
    stride = torch.randint(1, 4, (size, 1), generator=g)
    seq = (start + stride * torch.arange(ctx + 1)) % vocab
    seq = seq[rank * size // world:(rank + 1) * size // world]
    return seq[:, :-1], seq[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    a = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = TinyLM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    opt = Lamb([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=a.lr)
    state = ckpt.TrainState(model, opt)
    if a.resume:
        ckpt.load(state, a.resume)

    end = a.stop_at or a.steps
    while state.step < end:
        ids, tgt = batch_for(state.step, a.batch, rank, world)
        loss = F.cross_entropy(model(ids).flatten(0, 1), tgt.flatten())
        loss.backward()
        scale = min(1.0, (state.step + 1) / 4) * (1 - 0.8 * state.step / a.steps)
        for g in opt.param_groups:
            g["lr"] = a.lr * scale
        opt.step()
        opt.zero_grad()
        state.step += 1
        view = loss.detach().clone()
        dist.all_reduce(view, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"{state.step:4d}  nll {view.item() / world:.4f}", flush=True)
        if a.save_every and state.step % a.save_every == 0:
            ckpt.save(state, a.out)

    if a.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, a.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
