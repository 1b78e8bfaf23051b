import torch


class PreferencePairs:
    """Prompts with a preferred and a rejected completion of varying length."""

    def __init__(self, n=64, prompt=4, longest=16, vocab=32, seed=11):
        g = torch.Generator().manual_seed(seed)
        total = prompt + longest
        self.chosen = torch.zeros(n, total, dtype=torch.long)
        self.rejected = torch.zeros(n, total, dtype=torch.long)
        self.chosen_mask = torch.zeros(n, total)
        self.rejected_mask = torch.zeros(n, total)
        for i in range(n):
            start = torch.randint(1, vocab, (1,), generator=g).item()
            ramp = (start + 3 * torch.arange(total)) % vocab
            noise = torch.randint(1, vocab, (total,), generator=g)
            lens = torch.randint(8, 13, (2,), generator=g).tolist()
            self.chosen[i, : prompt + lens[0]] = ramp[: prompt + lens[0]]
            self.rejected[i, :prompt] = ramp[:prompt]
            self.rejected[i, prompt : prompt + lens[1]] = noise[: lens[1]]
            self.chosen_mask[i, prompt : prompt + lens[0]] = 1
            self.rejected_mask[i, prompt : prompt + lens[1]] = 1

    def __len__(self):
        return len(self.chosen)


class PairLoader:
    """Global batches in an order that changes every epoch; each rank takes its slice of each batch."""

    def __init__(self, pairs, global_batch, rank, world, seed=5):
        self.pairs, self.global_batch = pairs, global_batch
        self.rank, self.local = rank, global_batch // world
        self.seed = seed

    def __len__(self):
        return len(self.pairs) // self.global_batch

    def batch(self, epoch, number):
        g = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.pairs), generator=g)
        first = number * self.global_batch + self.rank * self.local
        spot = torch.arange(first, first + self.local)
        idx = order[spot]
        p = self.pairs
        return {
            "row": spot,
            "chosen": p.chosen[idx],
            "rejected": p.rejected[idx],
            "chosen_mask": p.chosen_mask[idx],
            "rejected_mask": p.rejected_mask[idx],
        }
