import torch
import torch.nn as nn


class Translator(nn.Module):
    def __init__(self, src_vocab=30, tgt_vocab=34, dim=32):
        super().__init__()
        self.src = nn.Embedding(src_vocab, dim)
        self.tgt = nn.Embedding(tgt_vocab, dim)
        self.pos = nn.Embedding(16, dim)
        self.encoder = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, bias=False, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(dim, 4, 2 * dim, dropout=0.0, bias=False, batch_first=True)
        self.out = nn.Linear(dim, tgt_vocab, bias=False)
        with torch.no_grad():
            # word frequencies are skewed, so start the embeddings at different sizes
            self.src.weight.mul_(torch.linspace(0.2, 1.5, src_vocab)[:, None])

    def forward(self, src, tgt):
        n, m = src.shape[1], tgt.shape[1]
        memory = self.encoder(self.src(src) + self.pos(torch.arange(n)))
        causal = torch.ones(m, m, dtype=torch.bool).triu(1)
        h = self.decoder(self.tgt(tgt) + self.pos(torch.arange(m)), memory, tgt_mask=causal)
        return self.out(h)
