"""Reference log probabilities are worked out once, before the first step, with the untouched policy itself; no second
model is held. The table belongs to the run: it is saved with it and never worked out again after a resume."""
import torch
import torch.distributed as dist


def answer_logp(model, ids, mask):
    lp = torch.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (lp * mask[:, 1:]).sum(-1)


@torch.no_grad()
def reference_table(model, pair, n_pairs, rank, world, chunk=20):
    """-> tensor (n_pairs, 2): log probability of the chosen and of the rejected answer, complete on every rank."""
    assert n_pairs % (world * chunk) == 0
    table = torch.zeros(n_pairs, 2)
    mine = list(range(rank, n_pairs, world))
    for at in range(0, len(mine), chunk):
        part = mine[at:at + chunk]
        c, r, m = (torch.tensor(t) for t in zip(*(pair(i) for i in part)))
        table[part, 0] = answer_logp(model, c, m.float())
        table[part, 1] = answer_logp(model, r, m.float())
    dist.all_reduce(table)
    return table
