import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from lm import TiedLM


class Arithmetic:
    """Documents that count modulo the vocabulary with a hidden stride; lengths vary a lot, padding is -1."""

    def __init__(self, vocab, seed):
        self.vocab = vocab
        self.np, self.py = np.random.default_rng(seed), random.Random(seed)

    def draw(self, n):
        docs = []
        for _ in range(n):
            length, stride = self.py.choice([5, 9, 14, 30]), self.py.randint(1, 4)
            doc = (self.np.integers(self.vocab) + stride * np.arange(length + 1)) % self.vocab
            slip = self.np.random(length + 1) < 0.05
            doc[slip] = self.np.integers(self.vocab, size=slip.sum())
            docs.append(torch.from_numpy(doc))
        ids = torch.nn.utils.rnn.pad_sequence(docs, batch_first=True, padding_value=-1)
        return ids[:, :-1].clamp(min=0), ids[:, 1:].contiguous()

    def state_dict(self):
        return {"np": self.np.bit_generator.state, "py": self.py.getstate()}

    def load_state_dict(self, sd):
        self.np.bit_generator.state = sd["np"]
        version, words, gauss = sd["py"]
        self.py.setstate((version, tuple(words), gauss))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--micro", type=int, default=3, help="documents in one forward pass")
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(60)
    model = TiedLM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            # the losses are sums divided by the tokens of the global batch, so the gradients are added, not averaged
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
    optim = torch.optim.RAdam(model.parameters(), lr=args.lr)
    data = Arithmetic(50, 61)
    step = 0

    def snapshot():
        m, o = get_state_dict(model, optim)
        return {"model": m, "optim": o, "data": data.state_dict(), "step": step}

    if args.resume:
        state = snapshot()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume), key=int)))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        data.load_state_dict(state["data"])
        step = state["step"]

    while step < args.steps:
        ids, target = data.draw(args.batch)
        tokens = (target >= 0).sum()
        ids, target = ids[rank::world], target[rank::world]
        total = torch.zeros(())
        pieces = list(zip(ids.split(args.micro), target.split(args.micro)))
        for k, (x, y) in enumerate(pieces):
            model.set_requires_gradient_sync(k + 1 == len(pieces))
            loss = model(x, y) / tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optim.step()
        optim.zero_grad()
        step += 1
        dist.all_reduce(total)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {total.item():.4f} over {tokens.item()} tokens", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(), checkpoint_id=os.path.join(args.out, str(step)))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
