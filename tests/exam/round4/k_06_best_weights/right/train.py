"""GRU language model on a small corpus; keeps the weights of the best validation loss and exports them at the end."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LEN = 30, 20


class GRULM(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.head(h + self.mix(h))


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    trans = torch.softmax(2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)), -1)
    x = torch.randint(VOCAB, (n, 1), generator=g)
    for _ in range(LEN):
        x = torch.cat([x, torch.multinomial(trans[x[:, -1]], 1, generator=g)], 1)
    return x


def nll(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def validate(model, rows, world):
    model.eval()
    v = nll(model, rows).double()
    dist.all_reduce(v)
    model.train()
    return v.item() / world


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=1.2e-2)
    p.add_argument("--eval-every", type=int, default=4)
    p.add_argument("--export", default=os.path.join(tempfile.gettempdir(), "gru_best.pt"))
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    train_rows = corpus(32, seed=1)          # tiny on purpose: it overfits
    valid_rows = corpus(64, seed=2)[rank::world]

    torch.manual_seed(0)
    model = GRULM()
    fully_shard(model.mix, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-5, weight_decay=0.0)

    best, best_loss, best_step = None, float("inf"), 0
    for step in range(1, args.steps + 1):
        g = torch.Generator().manual_seed(step)
        ids = torch.randperm(len(train_rows), generator=g)[: args.batch].chunk(world)[rank]
        loss = nll(model, train_rows[ids])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        if step % args.eval_every == 0:
            val = validate(model, valid_rows, world)
            if val < best_loss:
                best_loss, best_step = val, step
                best = {k: v.detach().clone() for k, v in get_model_state_dict(model).items()}
            if rank == 0:
                print(f"step {step} train {loss.item():.4f} valid {val:.4f} best {best_loss:.4f} (step {best_step})", flush=True)

    # back to the best weights, then one plain file for inference
    set_model_state_dict(model, best)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"model": full, "valid": best_loss, "step": best_step}, args.export)
        print(f"exported step {best_step}, valid {best_loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
