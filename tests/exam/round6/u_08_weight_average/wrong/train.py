"""Character model on a synthetic grammar; the result is the average of the weights of the last steps."""
import argparse
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from averaging import WeightAverage
from lm import CharLM

STEPS, AVERAGE_FROM, BATCH, LENGTH, VOCAB = 30, 15, 8, 24, 24


def sentences(n, gen):
    """x[t+1] = x[t] + 5 or x[t] * 3, chosen by a coin that favours the first."""
    x = torch.randint(0, VOCAB, (n, 1), generator=gen)
    for _ in range(LENGTH):
        last = x[:, -1:]
        coin = torch.rand(n, 1, generator=gen) < 0.8
        x = torch.cat([x, torch.where(coin, last + 5, last * 3) % VOCAB], dim=1)
    return x


def nll(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def sharded():
    torch.manual_seed(1)
    model = CharLM()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model, reshard_after_forward=True)


def state(model, opt, average, gen, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "optimizer": o, "average": get_model_state_dict(average.module),
            "gen": gen.get_state(), "step": step}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", type=Path)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", type=Path)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = sharded()
    average = WeightAverage(sharded())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    gen = torch.Generator().manual_seed(2)
    val = sentences(64, torch.Generator().manual_seed(3)).chunk(world)[rank]

    step = 0
    if args.resume:
        newest = max(args.resume.glob("step*"), key=lambda p: int(re.sub(r"\D", "", p.name)))
        sd = state(model, opt, average, gen, 0)
        dcp.load(sd, checkpoint_id=newest)
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["optimizer"])
        set_model_state_dict(average.module, sd["average"])
        gen.set_state(sd["gen"])
        step = sd["step"]

    while step < STEPS:
        batch = sentences(BATCH, gen).chunk(world)[rank]
        loss = nll(model, batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step > AVERAGE_FROM:
            average.update_parameters(model)
        if rank == 0 and step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            dcp.save(state(model, opt, average, gen, step), checkpoint_id=args.out / f"step{step}")

    with torch.no_grad():
        result = torch.stack([nll(model, val), nll(average, val)])
    dist.all_reduce(result)
    if rank == 0:
        print("validation: last {:.5f} average {:.5f}".format(*(result / world).tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
