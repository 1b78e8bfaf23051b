import torch
import torch.nn as nn
import torch.nn.functional as F


class GRUBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gru = nn.GRU(d, d, batch_first=True)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        return self.norm(x + self.gru(x)[0])


class Policy(nn.Module):
    def __init__(self, vocab=12, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([GRUBlock(d), GRUBlock(d)])
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def token_logp(model, ids, prompt):
    logits = model(ids[:, :-1])[:, prompt - 1 :]
    return F.log_softmax(logits, -1).gather(-1, ids[:, prompt:, None]).squeeze(-1)


@torch.no_grad()
def roll_out(model, prompts, uniforms):
    """Sample by inverse CDF from given uniform numbers, so that a sequence's sample belongs to it and not to the rank."""
    ids = prompts
    for t in range(uniforms.shape[1]):
        probs = model(ids)[:, -1].softmax(-1)
        pick = (probs.cumsum(-1) < uniforms[:, t : t + 1]).sum(-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
        ids = torch.cat([ids, pick], 1)
    model.reshard()
    return ids
