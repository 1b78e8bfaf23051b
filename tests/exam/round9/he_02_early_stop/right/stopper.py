import torch


class EarlyStopping:
    """Keeps the best weights seen so far and says when to stop."""

    def __init__(self, patience):
        self.patience = patience
        self.best_loss = float("inf")
        self.best_epoch = -1
        self.bad_epochs = 0
        self.best_weights = None

    def update(self, epoch, loss, model):
        if loss < self.best_loss:
            self.best_loss, self.best_epoch, self.bad_epochs = loss, epoch, 0
            self.best_weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
        else:
            self.bad_epochs += 1
        return self.bad_epochs >= self.patience

    def restore(self, model):
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.copy_(self.best_weights[name])

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        self.__dict__.update(state)
