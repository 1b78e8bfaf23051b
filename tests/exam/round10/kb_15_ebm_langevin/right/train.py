"""Energy-based model of images with persistent contrastive divergence."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from energy import EnergyNet
from lion import Lion
from sampler import PersistentChains

SHAPE = (1, 8, 8)


def crosses(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = -torch.ones(n, *SHAPE)
    for i, (r, c) in enumerate(torch.randint(1, 7, (n, 2), generator=g).tolist()):
        x[i, 0, r, :] = 0.9
        x[i, 0, :, c] = 0.9
    return (x + 0.05 * torch.randn(x.shape, generator=g)).clamp(-1, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--ckpt", default="ebm")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = EnergyNet()
    for conv in model.convs:
        fully_shard(conv)
    fully_shard(model)
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.01)
    chains = PersistentChains(model, 96, SHAPE, args.batch, seed=1)
    data = crosses(200, seed=2)
    step = 0

    if args.resume:
        newest = max(os.listdir(args.ckpt), key=lambda name: int(name.lstrip("s")))
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optim": o, "pool": chains.pool, "chain_rng": chains.gen.get_state(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.ckpt, newest))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        chains.pool = state["pool"]
        chains.gen.set_state(state["chain_rng"])
        step = state["step"]

    while step < args.steps:
        idx = torch.randint(len(data), (args.batch,), generator=torch.Generator().manual_seed(1000 + step))
        real = data[idx].chunk(world)[rank]
        fake = chains.sample()
        energy = model(torch.cat([real, fake]))
        e_real, e_fake = energy[: len(real)], energy[len(real):]
        contrast = e_real.mean() - e_fake.mean()
        loss = contrast + 0.1 * (e_real.square().mean() + e_fake.square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log = torch.stack([loss.detach(), contrast.detach()])
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step} loss {log[0] / world:.5f} contrast {log[1] / world:.5f}")
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            dcp.save({"model": m, "optim": o, "pool": chains.pool, "chain_rng": chains.gen.get_state(), "step": step},
                     checkpoint_id=os.path.join(args.ckpt, f"s{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
