import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WORDS, BINS, FRAMES = 25, 6, 10, 24


class SpeechTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv1d(BINS, dim, 4, stride=2)
        self.rnn = nn.GRU(dim, dim, batch_first=True)

    def forward(self, mel):
        h = F.gelu(self.conv(mel)).transpose(1, 2)
        return self.rnn(h)[0].mean(1)


class TextTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.mlp = nn.Sequential(nn.Linear(WORDS * dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, ids):
        return self.mlp(self.emb(ids).flatten(1))


class SpeechText(nn.Module):
    def __init__(self, dim=32, queue=48):
        super().__init__()
        self.speech, self.text = SpeechTower(dim), TextTower(dim)
        self.log_scale = nn.Parameter(torch.full((1,), 2.0))
        # embeddings of earlier texts as further negatives, alike on all ranks
        self.register_buffer("queue", F.normalize(torch.randn(queue, dim), dim=-1))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.long))

    def forward(self, mel, ids):
        s = F.normalize(self.speech(mel), dim=-1)
        t = F.normalize(self.text(ids), dim=-1)
        return s, t, self.log_scale.exp()

    @torch.no_grad()
    def enqueue(self, rows):
        at = (self.cursor + torch.arange(len(rows))) % len(self.queue)
        self.queue[at] = rows
        self.cursor.add_(len(rows)).remainder_(len(self.queue))


_voice = torch.randn(VOCAB, BINS, generator=torch.Generator().manual_seed(12))


def batch(step, n):
    g = torch.Generator().manual_seed(5_550 + step)
    ids = torch.randint(0, VOCAB, (n, WORDS), generator=g)
    mel = _voice[ids].repeat_interleave(FRAMES // WORDS, 1).transpose(1, 2)
    return mel + 0.3 * torch.randn(n, BINS, FRAMES, generator=g), ids
