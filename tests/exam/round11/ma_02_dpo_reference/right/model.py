import torch
import torch.nn as nn
import torch.nn.functional as F


class GRULM(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h + self.mlp(self.norm(h)))


def sequence_logp(model, ids, prompt_len):
    """Sum of the log-probabilities of the response tokens."""
    logp = F.log_softmax(model(ids[:, :-1]), dim=-1)
    tok = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return tok[:, prompt_len - 1:].sum(-1)
