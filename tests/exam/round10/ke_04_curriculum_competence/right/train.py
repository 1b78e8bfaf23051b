import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from curriculum import CompetenceCurriculum
from engine import Engine
from net import Adder


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(8)
    model = Adder(width=6)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
    curriculum = CompetenceCurriculum(levels=6, threshold=1.6)
    engine = Engine(model, optimizer, scheduler, curriculum, batch=32, width=6, seed=4)
    if args.resume:
        engine.load(args.resume)

    for m in engine.run(args.steps):
        if engine.rank == 0 and m["step"] % 3 == 0:
            print(f"step {m['step']:3d} level {m['level']} loss {m['loss']:.4f}", flush=True)
        if args.save_every and m["step"] % args.save_every == 0:
            engine.save(args.out)

    if args.export:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if engine.rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
