"""Direct preference optimization of a small language model; exports the result and evaluates the exported file."""
import argparse
import copy
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from export import export
from model import COLUMN_SHARDED, PolicyLM, response_logp

VOCAB, PROMPT, RESPONSE, BATCH = 24, 4, 6, 32


def preferences(step, n=BATCH):
    """Of two responses the one that counts upwards from the last token of the prompt is preferred."""
    g = torch.Generator().manual_seed(600 + step)
    prompt = torch.randint(0, VOCAB, (n, PROMPT), generator=g)
    good = (prompt[:, -1:] + torch.arange(1, RESPONSE + 1)) % VOCAB
    noise = torch.rand(good.shape, generator=g) < 0.3
    bad = torch.where(noise, torch.randint(0, VOCAB, good.shape, generator=g), good.flip(1))
    return torch.cat([prompt, good], 1), torch.cat([prompt, bad], 1)


def margins(model, reference, chosen, rejected):
    with torch.no_grad():
        base = response_logp(reference, chosen, PROMPT) - response_logp(reference, rejected, PROMPT)
    return response_logp(model, chosen, PROMPT) - response_logp(model, rejected, PROMPT) - base


def placement(name_of):
    return lambda p: Shard(1) if name_of[p].split(".")[-2] in COLUMN_SHARDED else Shard(0)


def app_state(model, opt, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o, "step": step}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--beta", type=float, default=0.1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="", help="folder of the exported model (a temporary one by default)")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(17)
    model = PolicyLM(VOCAB)
    reference = copy.deepcopy(model).requires_grad_(False)
    place = placement({p: n for n, p in model.named_parameters()})
    for block in model.blocks:
        fully_shard(block, shard_placement_fn=place)
    fully_shard(model, shard_placement_fn=place)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)

    start = 0
    if args.resume:
        folder = max((d for d in os.listdir(args.resume) if d.startswith("dpo")), key=lambda d: int(d[3:]))
        state = app_state(model, opt, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, folder))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        start = state["step"]

    for step in range(start, args.steps):
        chosen, rejected = (x.chunk(world)[rank] for x in preferences(step))
        margin = margins(model, reference, chosen, rejected)
        loss = -F.logsigmoid(args.beta * margin).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        stats = torch.stack([loss.detach(), (margin > 0).float().mean()])
        dist.all_reduce(stats)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"step {step + 1} dpo loss {stats[0].item() / world:.4f} accuracy {stats[1].item() / world:.3f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            dcp.save(app_state(model, opt, step + 1), checkpoint_id=os.path.join(args.out, f"dpo{step + 1}"))

    box = [args.export or (tempfile.mkdtemp() if rank == 0 else None)]
    dist.broadcast_object_list(box, src=0)
    export(model, box[0])
    if rank == 0:
        exported = PolicyLM(VOCAB)
        exported.load_state_dict(torch.load(os.path.join(box[0], "model.pt")))
        with torch.no_grad():
            margin = margins(exported, reference, *preferences(5000, 256))
        print(f"exported model: dpo loss {-F.logsigmoid(args.beta * margin).mean():.4f} accuracy {(margin > 0).float().mean():.3f}")
        if not args.export:
            shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
