import torch
import torch.distributed as dist


def reward(ids, n_prompt):
    """Answers are to consist of even tokens, and of different ones."""
    ans = ids[:, n_prompt:]
    even = (ans % 2 == 0).float().mean(1)
    repeats = (ans[:, 1:] == ans[:, :-1]).float().mean(1)
    return even - 0.5 * repeats


def group_advantage(local_reward, group, rank, world):
    """The members of a group are spread over the ranks: collect all rewards, normalise per group, keep our own."""
    parts = [torch.empty_like(local_reward) for _ in range(world)]
    dist.all_gather(parts, local_reward)
    everyone = torch.stack(parts, 1).flatten()         # undo the interleaved split ids[rank::world]
    g = everyone.view(-1, group)
    adv = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True, unbiased=False) + 1e-4)
    return adv.flatten()[rank::world].contiguous(), everyone.mean()
