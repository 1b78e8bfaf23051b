"""Click prediction with a trainer that is steered by callbacks: going back to the best weights on a plateau."""

import argparse

import torch.distributed as dist

from callbacks import Print, RollbackOnPlateau, Save, Stop
from net import make
from source import CARDS, click_data
from trainer import Trainer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    net = make(CARDS)
    train, valid = click_data()
    rollback = RollbackOnPlateau(patience=2, factor=0.5)
    rollback.attach(net)
    callbacks = [rollback, Stop(rollback, 6), Print(), Save(args.out, args.save_every)]
    trainer = Trainer(net, args.lr, train, valid, args.batch, args.eval_every, callbacks)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit(args.steps)
    if trainer.rank == 0:
        print(f"finished at step {trainer.step}, best validation loss {rollback.best:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
