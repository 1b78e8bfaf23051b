"""A loop that emits events; everything else is a callback."""


class Engine:
    def __init__(self, update, batches):
        self.update, self.batches, self.step, self.hooks = update, batches, 0, []

    def add(self, hook):
        self.hooks.append(hook)
        return hook

    def emit(self, name, *a):
        for h in self.hooks:
            fn = getattr(h, name, None)
            if fn:
                fn(self, *a)

    def run(self, steps):
        while self.step < steps:
            self.emit("before")
            result = self.update(next(self.batches))
            self.step += 1
            self.emit("after", result)
