"""Forward hooks that keep the outputs of chosen blocks until they are taken."""


class FeatureTaps:
    def __init__(self, modules, detach):
        self.kept = []
        self.detach = detach
        self.handles = [m.register_forward_hook(self._keep) for m in modules]

    def _keep(self, module, args, output):
        self.kept.append(output.detach() if self.detach else output)

    def take(self):
        kept, self.kept = self.kept, []
        return kept

    def close(self):
        for h in self.handles:
            h.remove()
