"""A small fit() engine with callbacks; knows nothing of the task."""
import torch.distributed as dist


class Callback:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def on_epoch_end(self, engine, metrics):
        pass

    def on_fit_end(self, engine):
        pass


class Engine:
    def __init__(self, model, optimizer, train_epoch, validate, callbacks):
        self.model, self.optimizer = model, optimizer
        self.train_epoch, self.validate, self.callbacks = train_epoch, validate, callbacks
        self.epoch = 0
        self.should_stop = False

    def fit(self, epochs):
        while self.epoch < epochs and not self.should_stop:
            train_loss = self.train_epoch(self.model, self.optimizer, self.epoch)
            self.epoch += 1
            metrics = {"train": train_loss, "val": self.validate(self.model)}
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch:2d} train {metrics['train']:.5f} val {metrics['val']:.5f}", flush=True)
            for callback in self.callbacks:
                callback.on_epoch_end(self, metrics)
        for callback in self.callbacks:
            callback.on_fit_end(self)
