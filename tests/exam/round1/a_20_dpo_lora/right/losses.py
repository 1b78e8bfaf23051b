import torch
import torch.nn.functional as F


def sequence_logp(model, ids, mask):
    """Sum of the log-probabilities of the answer tokens, per row."""
    logp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logp * mask[:, 1:]).sum(-1)


def paired_logp(model, chosen, chosen_mask, rejected, rejected_mask):
    """Both halves in one pass."""
    both = sequence_logp(model, torch.cat([chosen, rejected]), torch.cat([chosen_mask, rejected_mask]))
    return both.chunk(2)


def dpo(policy, ref, beta):
    margin = beta * ((policy[0] - ref[0]) - (policy[1] - ref[1]))
    return -F.logsigmoid(margin).mean(), (margin > 0).float().mean()
