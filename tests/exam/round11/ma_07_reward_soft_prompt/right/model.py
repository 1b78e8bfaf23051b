import torch
import torch.nn as nn


class RewardModel(nn.Module):
    """Transformer encoder with a trainable soft prompt in front and a scalar score."""

    def __init__(self, vocab=40, dim=32, prompt=8, length=12):
        super().__init__()
        self.soft_prompt = nn.Parameter(0.5 * torch.randn(prompt, dim))
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(prompt + length, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True) for _ in range(2))
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, ids):
        prompt = self.soft_prompt.expand(len(ids), -1, -1)
        x = torch.cat([prompt, self.emb(ids)], 1)
        x = x + self.pos(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.score(x[:, : self.soft_prompt.shape[0]].mean(1))
