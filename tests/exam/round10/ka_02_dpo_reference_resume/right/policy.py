import torch
import torch.nn as nn


class Policy(nn.Module):
    """Small GRU language model that scores responses."""

    def __init__(self, vocab=32, dim=40):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.lm_head(self.norm(h))


def response_logps(model, ids, mask):
    """Sum of log-probabilities of the response tokens."""
    logp = model(ids[:, :-1]).log_softmax(-1)
    picked = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (picked * mask[:, 1:]).sum(-1)
