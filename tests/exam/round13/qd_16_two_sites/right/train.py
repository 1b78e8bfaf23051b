import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outer import Outer
from sites import SITES, site_batch


def main():
    ap = argparse.ArgumentParser(description="Federated training of two sites with rare communication")
    ap.add_argument("--rounds", type=int, default=6)
    ap.add_argument("--inner", type=int, default=3)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--state", default="", help="folder of the outer state")
    ap.add_argument("--save-round", type=int, default=0)
    ap.add_argument("--resume", action="store_true")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    groups = min(SITES, world)  # a single process plays both sites in turn
    mesh = init_device_mesh("cpu", (groups, world // groups), mesh_dim_names=("site", "shard"))
    site_rank, shard_rank, shards = mesh.get_local_rank("site"), mesh.get_local_rank("shard"), mesh["shard"].size()

    torch.manual_seed(44)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 1))
    fully_shard(model[2], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    outer = Outer(model, mesh.get_group("site"))
    path, first = os.path.join(a.state, "outer.pt"), 0
    if a.resume:
        ck = torch.load(path)
        outer.load_full_state(ck)
        first = ck["round"]

    for r in range(first, a.rounds):
        total = torch.zeros(())
        for site in range(site_rank, SITES, groups):
            outer.begin_site()
            opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            for k in range(a.inner):
                x, y = (t[shard_rank::shards] for t in site_batch(site, r, k, a.batch))
                loss = nn.functional.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.detach() / (a.inner * SITES * shards)
            outer.end_site()
        outer.step()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"round {r + 1} mean inner loss {total.item():.5f}", flush=True)
        if r + 1 == a.save_round:
            ck = {**outer.full_state(), "round": r + 1}
            if dist.get_rank() == 0:
                torch.save(ck, path)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
