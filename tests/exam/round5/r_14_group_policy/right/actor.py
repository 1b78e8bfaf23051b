import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from env import MAXLEN, PROMPT, VOCAB


class Actor(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.prompt, self.token = nn.Linear(PROMPT, d), nn.Embedding(VOCAB + 1, d)
        self.pos = nn.Embedding(MAXLEN, d)
        self.mix = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(2))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, prompt, tokens):
        """Logits of every position; position t sees the prompt and the tokens before t."""
        shifted = torch.cat([torch.full_like(tokens[:, :1], VOCAB), tokens[:, :-1]], 1)
        n = tokens.shape[1]
        x = self.token(shifted) + self.pos(torch.arange(n)) + self.prompt(prompt)[:, None]
        x = x + x.cumsum(1) / torch.arange(1, n + 1)[:, None]
        for block in self.mix:
            x = x + block(x)
        return self.head(x)


def make_actor():
    torch.manual_seed(0)
    a = Actor()
    for block in a.mix:
        fully_shard(block)
    return fully_shard(a)


def freeze_copy_of(actor):
    ref = make_actor()
    set_model_state_dict(ref, get_model_state_dict(actor))
    return ref.requires_grad_(False)
