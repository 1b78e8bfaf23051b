import torch
import torch.nn as nn
import torch.nn.functional as F

from encoder import PretrainedEncoder


class CrossBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, h, img):
        k, v = self.kv(img).chunk(2, -1)
        h = h + self.o(F.scaled_dot_product_attention(self.q(self.n1(h)), k, v))
        return h + self.ff(self.n2(h))


class VisualQA(nn.Module):
    def __init__(self, questions=4, answers=3, d=24, depth=2):
        super().__init__()
        self.encoder = PretrainedEncoder()
        self.project = nn.Linear(12, d)
        self.place = nn.Parameter(0.5 * torch.randn(9, d))
        self.question = nn.Embedding(questions, d)
        self.blocks = nn.ModuleList(CrossBlock(d) for _ in range(depth))
        self.head = nn.Linear(d, answers)
        self.encoder.requires_grad_(False)

    def forward(self, image, question):
        with torch.no_grad():
            feats = self.encoder(image)
        img = self.project(feats) + self.place
        h = self.question(question)[:, None]
        for b in self.blocks:
            h = b(h, img)
        return self.head(h[:, 0])
