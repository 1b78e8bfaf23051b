from collections import defaultdict


class Engine:
    """Events in, handlers out. The engine knows nothing about models."""

    EVENTS = ("start", "before_step", "forward", "after_backward", "update", "after_step", "end")

    def __init__(self, state):
        self.state = state
        self.handlers = defaultdict(list)

    def on(self, event, every=1):
        assert event in self.EVENTS, event

        def register(fn):
            self.handlers[event].append((every, fn))
            return fn

        return register

    def emit(self, event):
        for every, fn in self.handlers[event]:
            if self.state.step % every == 0:
                fn(self.state)

    def run(self, until):
        self.emit("start")
        while self.state.step < until:
            for event in ("before_step", "forward", "after_backward", "update"):
                self.emit(event)
            self.state.step += 1
            self.emit("after_step")
        self.emit("end")
