import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class RewardModel(nn.Module):
    def __init__(self, vocab=50, dim=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, 3, padding=1) for _ in range(layers))
        self.score = nn.Linear(dim, 1)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        for conv in self.convs:
            x = x + torch.tanh(conv(x))
        return self.score(x.mean(-1)).squeeze(-1)


def shard(model):
    for conv in model.convs:
        fully_shard(conv)
    fully_shard(model)
    return model


class Clipper:
    """Clips the global gradient norm of a model before each optimizer step."""

    def __init__(self, model, max_norm):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.max_norm = max_norm

    def __call__(self):
        return nn.utils.clip_grad_norm_(self.params, self.max_norm)
