class Unfreeze:
    """head only at first; the backbone joins at a given step"""

    def __init__(self, model, at):
        self.model, self.at = model, at
        model.backbone.requires_grad_(False)

    def before_step(self, step):
        if step >= self.at:
            self.model.backbone.requires_grad_(True)
