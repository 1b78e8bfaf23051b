class Run:
    """The loop knows nothing but the order of events."""

    def __init__(self, model, opt, loss_fn, batch_fn, total, rank, world, callbacks):
        self.model, self.opt, self.loss_fn, self.batch_fn = model, opt, loss_fn, batch_fn
        self.total, self.rank, self.world, self.callbacks = total, rank, world, callbacks
        self.step = self.micro = 0
        self.micro_per_step = 1

    def fire(self, event, *args):
        for cb in self.callbacks:
            getattr(cb, event)(self, *args)

    def go(self):
        self.fire("on_start")
        while self.step < self.total:
            for self.micro in range(self.micro_per_step):
                x, y = self.batch_fn(self.step * self.micro_per_step + self.micro)
                loss = self.loss_fn(self.model(x), y)
                for cb in self.callbacks:
                    loss = cb.on_loss(self, loss)
                loss.backward()
            self.fire("on_grads")
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.fire("on_step")
        self.fire("on_end")
