import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from callbacks import Checkpoint, Ema, Log
from task import Data, build
from trainer import Trainer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=6, help="evaluate, and save if --out is given")
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()
    dist.init_process_group("gloo")

    model = build()
    opt = torch.optim.Adam(model.parameters(), lr=8e-3, eps=1e-6)
    ema = Ema(model)
    saver = Checkpoint(args.out, ema)
    trainer = Trainer(model, opt, Data(args.batch), args.steps, args.save_every, [Log(), saver, ema])
    if args.resume:
        saver.load(args.resume, trainer)
    trainer.fit(args.stop_at or args.steps)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    averaged = {f"ema.{n}": v.full_tensor() for n, v in ema.shadow.items()}
    if args.export and dist.get_rank() == 0:
        torch.save({**full, **averaged}, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
