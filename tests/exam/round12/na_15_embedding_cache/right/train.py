"""Training of a shared-tower retriever with a batch larger than fits in one forward."""
import dataclasses
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from cache import CachedContrast
from tower import Tower


@dataclasses.dataclass
class Options:
    steps: int = 16
    batch: int = 32
    chunk: int = 4
    vocab: int = 60
    length: int = 8
    lr: float = 4e-3
    out: str = ""
    save_every: int = 0
    resume: str = ""


def options(argv):
    o = Options()
    it = iter(argv)
    for key in it:
        name = key[2:].replace("-", "_")
        setattr(o, name, type(getattr(o, name))(next(it)))
    return o


def query_document_pairs(o, step):
    g = torch.Generator().manual_seed(40 + step)
    doc = torch.randint(20, (o.batch, 1), generator=g) * 3 + torch.randint(3, (o.batch, o.length), generator=g)
    query = doc.roll(1, 1)
    noise = torch.randint(o.vocab, query.shape, generator=g)
    return torch.where(torch.rand(query.shape, generator=g) < 0.5, noise, o.vocab - 1 - query), doc


def main():
    o = options(sys.argv[1:])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    model = Tower(o.vocab)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.NAdam(model.parameters(), lr=o.lr)
    contrast = CachedContrast(model, o.chunk)

    def state(step):
        m, s = get_state_dict(model, opt)
        return {"model": m, "opt": s, "step": torch.tensor(step)}

    start = 0
    if o.resume and os.path.exists(os.path.join(o.resume, "current")):
        with open(os.path.join(o.resume, "current")) as f:
            name = f.read().strip()
        s = state(0)
        dcp.load(s, checkpoint_id=os.path.join(o.resume, name))
        set_state_dict(model, opt, model_state_dict=s["model"], optim_state_dict=s["opt"])
        start = int(s["step"])

    for step in range(start, o.steps):
        query, doc = (t.chunk(world)[rank] for t in query_document_pairs(o, step))
        loss = contrast.backward(query, doc)
        opt.step()
        opt.zero_grad()
        if rank == 0 and (step % 3 == 0 or step + 1 == o.steps):
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        if o.out and o.save_every and (step + 1) % o.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(o.out, f"step{step + 1}"))
            if rank == 0:
                with open(os.path.join(o.out, "current"), "w") as f:
                    f.write(f"step{step + 1}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
