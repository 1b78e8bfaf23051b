import torch
import torch.nn as nn


class ConvLM(nn.Module):
    """Causal gated convolutions instead of attention."""

    def __init__(self, vocab=32, dim=32, layers=3, kernel=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 2 * dim, kernel) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)
        self.kernel = kernel

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        for conv in self.convs:
            a, b = conv(nn.functional.pad(x, (self.kernel - 1, 0))).chunk(2, 1)
            x = x + a * torch.sigmoid(b)
        return self.head(self.norm(x.transpose(1, 2)))


def token_logp(model, ids):
    logp = model(ids[:, :-1]).log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
