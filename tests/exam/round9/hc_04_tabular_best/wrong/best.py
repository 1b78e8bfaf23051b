import torch
import torch.distributed as dist


class BestKeeper:
    """Remembers the weights (this rank's shards) of the best validation score and when to stop."""

    def __init__(self, model, patience):
        self.model, self.patience = model, patience
        self.score, self.age, self.shards = float("inf"), 0, {}

    def update(self, score):
        if score < self.score:
            self.score, self.age = score, 0
            self.shards = {n: p.to_local().detach().clone() for n, p in self.model.named_parameters()}
        else:
            self.age += 1

    def should_stop(self):
        flag = torch.tensor(float(self.age >= self.patience))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    @torch.no_grad()
    def restore(self):
        for n, p in self.model.named_parameters():
            p.to_local().copy_(self.shards[n])

    def state_dict(self):
        return {"score": self.score, "age": self.age, "shards": self.shards}

    def load_state_dict(self, state):
        self.score, self.age, self.shards = state["score"], state["age"], state["shards"]
