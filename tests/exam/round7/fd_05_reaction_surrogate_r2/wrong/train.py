import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from chemistry import test_set, train_batch
from config import Config
from evaluation import evaluate


def build(cfg):
    torch.manual_seed(cfg.seed)
    layers = [nn.Linear(5, cfg.width), nn.SiLU()]
    for _ in range(cfg.depth):
        layers += [nn.Linear(cfg.width, cfg.width), nn.SiLU()]
    layers.append(nn.Linear(cfg.width, 1))
    net = nn.Sequential(*layers)
    for m in net:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    return fully_shard(net)


def main(cfg, report, weights):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(cfg)
    opt = torch.optim.RMSprop(model.parameters(), lr=cfg.lr, alpha=0.95)
    warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 10)
    x_test, y_test = test_set()

    history = []
    for step in range(1, cfg.steps + 1):
        x, y = train_batch(step, cfg.batch)
        loss = (model(x.chunk(world)[rank]).squeeze(-1) - y.chunk(world)[rank]).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        warmup.step()
        if step % cfg.eval_every == 0:
            metrics = evaluate(model, x_test, y_test)
            history.append({"step": step, **metrics})
            l = loss.detach().clone()
            dist.all_reduce(l)
            if rank == 0:
                print(f"step {step} loss {l.item() / world:.5f} R2 {metrics['r2']:.4f} RMSE {metrics['rmse']:.4f}")

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        if report:
            with open(report, "w") as f:
                json.dump(history, f, indent=1)
        if weights:
            torch.save({"weights": full, "history": [torch.tensor(list(h.values())) for h in history]}, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--report", help="json file for the metrics of the paper's table")
    p.add_argument("--weights")
    for k, v in vars(Config()).items():
        p.add_argument(f"--{k.replace('_', '-')}", type=type(v), default=v)
    a = vars(p.parse_args())
    main(report=a.pop("report"), weights=a.pop("weights"), cfg=Config(**a))
