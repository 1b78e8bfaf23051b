import torch
import torch.nn.functional as F


def answer_logp(model, ids, mask):
    """Sum of the log probabilities of the answer tokens, one number a sequence."""
    logits = model(ids[:, :-1])
    lp = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (lp * mask[:, 1:]).sum(-1)


def dpo_loss(policy, reference, chosen, rejected, mask, beta):
    both = torch.cat([chosen, rejected])
    m2 = torch.cat([mask, mask])
    pc, pr = answer_logp(policy, both, m2).chunk(2)
    with torch.no_grad():
        rc, rr = answer_logp(reference, both, m2).chunk(2)
    margin = beta * ((pc - rc) - (pr - rr))
    return -F.logsigmoid(margin).mean(), (margin > 0).float().mean()
