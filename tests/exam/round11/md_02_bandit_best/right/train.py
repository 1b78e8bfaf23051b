"""Off-policy learning of a neural bandit policy; the policy of the best epoch is delivered."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from bandit import make_logs
from callbacks import KeepBest, Report
from trainer import Trainer


def build_policy(dim=10, hidden=48, arms=5):
    return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, arms))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    policy = build_policy()
    for layer in policy:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(policy)
    opt = torch.optim.Adam(policy.parameters(), lr=3e-2)

    train, valid = make_logs()
    trainer = Trainer(policy, opt, train, valid, [KeepBest(policy), Report()])
    if args.resume:
        trainer.restore(args.resume)
    trainer.run(args.epochs, args.save_every, args.out)

    final = trainer.evaluate()
    if dist.get_rank() == 0:
        print(f"delivered policy has value {final:.4f}")
    if args.export:
        weights = {k: v.full_tensor() for k, v in policy.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
