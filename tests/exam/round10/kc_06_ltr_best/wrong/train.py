import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from metrics import evaluate
from queries import FEATURES, make_queries


class SetRanker(nn.Module):
    """Scores a document given the others of its query."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.Tanh())
        self.context = nn.Sequential(nn.Linear(2 * width, width), nn.GELU())
        self.head = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        h = self.embed(x)
        pooled = h.mean(dim=1, keepdim=True).expand_as(h)
        return self.head(self.context(torch.cat([h, pooled], dim=-1))).sum(-1)


def listwise_loss(scores, labels):
    wanted = torch.softmax(labels, dim=1)
    return -(wanted * torch.log_softmax(scores, dim=1)).sum(1).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--export", default=None, help="file for the best model")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_x, train_y = make_queries(128, seed=1, noise=1.2)
    valid_x, valid_y = make_queries(300, seed=2, noise=0.0)
    test_x, test_y = make_queries(300, seed=3, noise=0.0)

    torch.manual_seed(0)
    model = SetRanker()
    fully_shard(model.embed)
    fully_shard(model.context)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)

    best_ndcg, best_epoch, best_weights = -1.0, -1, None
    for epoch in range(args.epochs):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order.split(args.batch):
            mine = rows[rank::world]
            loss = listwise_loss(model(train_x[mine]), train_y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * args.batch / len(order)
        dist.all_reduce(total)
        score = evaluate(model, valid_x, valid_y)
        if rank == 0:
            print(f"epoch {epoch:2d} loss {total.item() / world:.4f} valid ndcg@5 {score:.5f}", flush=True)
        if score > best_ndcg:
            best_ndcg, best_epoch = score, epoch
            best_weights = get_model_state_dict(model)

    # the result of the training is the best epoch's model
    set_model_state_dict(model, best_weights)
    test = evaluate(model, test_x, test_y)
    if rank == 0:
        print(f"best epoch {best_epoch} valid {best_ndcg:.5f} test ndcg@5 {test:.5f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save({"weights": full, "epoch": best_epoch, "ndcg": best_ndcg}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
