import torch
import torch.distributed as dist
import torch.nn.functional as F


class Trainer:
    def __init__(self, model, optimizer, loader, epochs, accumulate, max_norm, callbacks=()):
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.epochs, self.accumulate, self.max_norm = epochs, accumulate, max_norm
        self.callbacks = list(callbacks)
        self.rank = dist.get_rank()
        self.epoch = self.batch = self.step = 0

    def progress(self):
        return {"epoch": self.epoch, "batch": self.batch, "step": self.step}

    def load_progress(self, state):
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]

    def _window_length(self, index):
        """Micro-batches in the window which holds this one; the last of an epoch may be short."""
        first = index - index % self.accumulate
        return min(self.accumulate, len(self.loader) - first)

    def _optimizer_step(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def fit(self):
        while self.epoch < self.epochs:
            self.loader.set_epoch(self.epoch)
            total, count = torch.zeros(()), 0
            for i, (x, y) in enumerate(self.loader):
                if i < self.batch:
                    continue
                flush = (i + 1) % self.accumulate == 0 or i + 1 == len(self.loader)
                self.model.set_requires_gradient_sync((i + 1) % self.accumulate == 0)
                loss = F.mse_loss(self.model(x), y[:, None])
                (loss / self._window_length(i)).backward()
                total += loss.detach()
                count += 1
                self.batch = i + 1
                if flush:
                    self._optimizer_step()
                    for cb in self.callbacks:
                        cb.on_step_end(self)
            if count:
                dist.all_reduce(total)
                mean = total.item() / count / dist.get_world_size()
                for cb in self.callbacks:
                    cb.on_epoch_end(self, mean)
            self.epoch += 1
            self.batch = 0
