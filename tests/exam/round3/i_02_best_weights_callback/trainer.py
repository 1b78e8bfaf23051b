import torch
import torch.distributed as dist
import torch.nn.functional as F


class Trainer:
    def __init__(self, model, optimizer, train, valid, batch, callbacks, val_every=2):
        self.model, self.optimizer = model, optimizer
        self.train_set, self.valid_set = train, valid
        self.batch, self.callbacks, self.val_every = batch, callbacks, val_every
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step, self.last_loss, self.should_stop = 0, None, False

    def log(self, msg):
        if self.rank == 0:
            print(msg, flush=True)

    def fire(self, event, *a):
        for cb in self.callbacks:
            getattr(cb, event)(self, *a)

    def mean_over_ranks(self, t):
        t = t.detach().clone()
        dist.all_reduce(t)
        return (t / self.world).item()

    def batches(self):
        x, y = self.train_set
        g = torch.Generator().manual_seed(3)
        while True:
            perm = torch.randperm(len(x), generator=g)
            for chunk in perm.split(self.batch):
                mine = chunk[self.rank :: self.world]
                yield x[mine], y[mine]

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        x, y = (t[self.rank :: self.world] for t in self.valid_set)
        total = F.cross_entropy(self.model(x), y, reduction="sum").double()
        dist.all_reduce(total)
        self.model.reshard()
        self.model.train()
        return (total / len(self.valid_set[0])).item()

    def fit(self, max_steps):
        self.fire("on_fit_start")
        for x, y in self.batches():
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.last_loss = loss
            self.fire("on_step_end")
            if self.step % self.val_every == 0:
                self.fire("on_validation_end", self.validate())
            if self.should_stop or self.step >= max_steps:
                break
        self.fire("on_fit_end")
