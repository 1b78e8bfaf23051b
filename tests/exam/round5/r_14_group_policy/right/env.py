"""A toy 'answering' task: the prompt is a vector, an answer is a string of tokens ended by token 0; the reward counts
tokens of the prompt's favourite class and dislikes length."""
import torch

VOCAB, PROMPT, MAXLEN = 10, 6, 8


def prompts(step, size):
    return torch.randn(size, PROMPT, generator=torch.Generator().manual_seed(3000 + step))


def reward(prompt, tokens, mask):
    favourite = 1 + prompt[:, :3].argmax(1) * 3
    good = ((tokens >= favourite[:, None]) & (tokens < favourite[:, None] + 3)).float()
    return (good * mask).sum(1) - 0.2 * mask.sum(1)
