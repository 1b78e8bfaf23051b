"""Two-turn dialogues: <user> words <assistant> answer <end>, lengths vary; labels only on the assistant's tokens."""
import torch

USER, ASSISTANT, END, PAD = 0, 1, 2, 3
VOCAB, CTX = 40, 18


def dialogues(step, n):
    g = torch.Generator().manual_seed(77_000 + step)
    ids = torch.full((n, CTX + 1), PAD)
    labels = torch.full((n, CTX + 1), -100)
    for i in range(n):
        k = int(torch.randint(3, 8, (1,), generator=g))
        words = torch.randint(4, VOCAB, (k,), generator=g) // 3 * 3 + 1
        words = words.clamp(4, VOCAB - 2)
        answer = words + 1
        row = torch.cat([torch.tensor([USER]), words, torch.tensor([ASSISTANT]), answer, torch.tensor([END])])
        ids[i, :len(row)] = row
        labels[i, k + 2:len(row)] = row[k + 2:]
    return ids[:, :-1], labels[:, 1:]
