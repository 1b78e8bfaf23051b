import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Policy(nn.Module):
    """Next-token policy that sees the prompt, the position and the previous token."""

    def __init__(self, n_prompts, vocab, length, width=24, depth=2):
        super().__init__()
        self.prompt = nn.Embedding(n_prompts, width)
        self.prev = nn.Embedding(vocab + 1, width)
        self.pos = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, prompt, prev):
        # prompt [B], prev [B, t] -> logits [B, t, V]
        pos = torch.arange(prev.shape[1])
        x = self.prompt(prompt)[:, None] + self.prev(prev) + self.pos(pos)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed, **kw):
    torch.manual_seed(seed)
    model = Policy(**kw)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def token_logps(model, prompt, tokens, bos):
    prev = torch.cat([torch.full_like(tokens[:, :1], bos), tokens[:, :-1]], dim=1)
    logits = model(prompt, prev)
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
