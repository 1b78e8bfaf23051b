class Callback:
    def on_start(self, run): ...
    def on_stage(self, run, stage): ...
    def on_step(self, run): ...
    def on_end(self, run): ...


class Run:
    """Knows nothing about training details: it walks the step counter and tells the callbacks."""

    def __init__(self, update, plan, callbacks):
        self.update, self.plan, self.callbacks = update, plan, callbacks
        self.step, self.last = 0, None

    def tell(self, what, *extra):
        for cb in self.callbacks:
            getattr(cb, what)(self, *extra)

    def go(self, total):
        self.tell("on_start")
        stage = None
        while self.step < total:
            now = self.plan(self.step)
            if now is not stage:
                stage = now
                self.tell("on_stage", stage)
            self.last = self.update(self.step, stage)
            self.step += 1
            self.tell("on_step")
        self.tell("on_end")
