import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from nets import net
from phases import batch_source, clip_weights, schedule

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40, help="moves of either player")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    nets = {"gen": net(4, 8), "critic": net(8, 1)}
    opts = {k: torch.optim.RMSprop(m.parameters(), lr=1e-3, eps=1e-4) for k, m in nets.items()}
    plan = schedule(3)
    player, gaps = next(plan), []
    if a.resume:
        st = torch.load(os.path.join(a.resume, "state.pt"), map_location="cpu")
        for k in nets:
            set_state_dict(
                nets[k],
                opts[k],
                model_state_dict=st[k][0],
                optim_state_dict=st[k][1],
                options=StateDictOptions(full_state_dict=True),
            )
        gaps = st["gaps"]
        for v in gaps:  # replays the coroutine to where it stood
            player = plan.send(v)

    g = torch.Generator().manual_seed(77)
    data = 0.5 * torch.tanh(torch.randn(512, 2, generator=g) @ torch.randn(2, 8, generator=g)) + 0.5
    fetch = batch_source(data, a.batch, rank, world, 4)
    while len(gaps) < a.steps:
        x, z = fetch(len(gaps))
        if player == "critic":
            with torch.no_grad():
                fake = nets["gen"](z)
            real_s, fake_s = nets["critic"](torch.cat([x, fake])).chunk(2)
            loss = fake_s.mean() - real_s.mean()
        else:
            loss = -nets["critic"](nets["gen"](z)).mean()
        for o in opts.values():
            o.zero_grad()
        loss.backward()
        opts[player].step()
        clip_weights(nets["critic"], 0.3)
        value = -loss.detach() / world
        dist.all_reduce(value)
        if rank == 0 and len(gaps) % 5 == 0:
            print(f"move {len(gaps)} {player} {value.item():.5f}", flush=True)
        gaps.append(value.item())
        player = plan.send(gaps[-1])
        if a.save_every and len(gaps) % a.save_every == 0:
            st = {k: get_state_dict(nets[k], opts[k], options=FULL) for k in nets}
            if rank == 0:
                os.makedirs(a.out, exist_ok=True)
                torch.save({**st, "gaps": gaps}, os.path.join(a.out, "state.pt"))
            dist.barrier()
    final = {f"{k}.{n}": v for k in nets for n, v in get_state_dict(nets[k], opts[k], options=FULL)[0].items()}
    if rank == 0 and a.export:
        torch.save(final, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
