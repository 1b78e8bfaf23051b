import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from game import Game


def snapshot(game):
    gm, go = get_state_dict(game.gen, game.og)
    cm, co = get_state_dict(game.critic, game.oc)
    return {"gen": gm, "gen_opt": go, "critic": cm, "critic_opt": co, "draws": game.draws}


def bring_back(game, path):
    sd = snapshot(game)
    dcp.load(sd, checkpoint_id=path)
    set_state_dict(game.gen, game.og, model_state_dict=sd["gen"], optim_state_dict=sd["gen_opt"])
    set_state_dict(game.critic, game.oc, model_state_dict=sd["critic"], optim_state_dict=sd["critic_opt"])
    game.draws = sd["draws"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24, help="generator steps")
    ap.add_argument("--n-critic", type=int, default=3)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--clip", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="game")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    game = Game(a.lr, a.clip, a.batch)
    first = 1
    if a.resume:
        last = max(int(d[1:]) for d in os.listdir(a.resume) if d.startswith("g"))
        bring_back(game, os.path.join(a.resume, f"g{last:05d}"))
        first = last + 1
    for it in range(first, a.steps + 1):
        c = [game.critic_step() for _ in range(a.n_critic)][-1]
        g = game.gen_step()
        both = torch.stack([c, g])
        dist.all_reduce(both)
        gap = game.distance()
        if game.rank == 0:
            c, g = (both / game.world).tolist()
            print(f"step {it} critic loss {c:.4f} gen loss {g:.4f} mean gap {gap:.3f}", flush=True)
        if a.save_every and it % a.save_every == 0:
            dcp.save(snapshot(game), checkpoint_id=os.path.join(a.out, f"g{it:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
