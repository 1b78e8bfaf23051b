import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from callbacks import BestWeights, History
from trainer import Trainer, TrainerArgs


class TextCNN(nn.Module):
    def __init__(self, vocab=50, dim=32, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.ModuleList(nn.Conv1d(dim, 24, k, padding="same") for k in (3, 5, 7))
        self.fc = nn.Sequential(nn.Linear(72, 48), nn.Tanh(), nn.Linear(48, classes))

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        x = torch.cat([F.gelu(conv(x)).amax(2) for conv in self.conv], 1)
        return self.fc(x)


def make_set(n, seed, flip):
    """Topics have preferred words; part of the labels is wrong, so that a long training overfits."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    topical = torch.rand(n, 14, generator=g) < 0.3
    ids = torch.where(
        topical, y[:, None] * 6 + torch.randint(0, 6, (n, 14), generator=g), torch.randint(0, 50, (n, 14), generator=g)
    )
    wrong = torch.rand(n, generator=g) < flip
    return ids, torch.where(wrong, torch.randint(0, 4, (n,), generator=g), y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    cli = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = TextCNN()
    fully_shard(model.fc)
    # the root must not stay gathered after an evaluation, the callbacks work on shards
    fully_shard(model, reshard_after_forward=True)
    args = TrainerArgs(save_every=cli.save_every, out=cli.out)
    # validation: a set that was checked by hand, then one from the crowd
    checked, crowd = make_set(48, 2, 0.0), make_set(48, 3, 0.5)
    val_set = tuple(torch.cat(pair) for pair in zip(checked, crowd))
    trainer = Trainer(model, args, make_set(64, 1, 0.3), val_set, [History(), BestWeights()])
    if cli.resume:
        trainer.resume(cli.resume)
    trainer.train()
    if cli.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(full, cli.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
