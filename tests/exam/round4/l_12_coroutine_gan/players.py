"""Each player is a generator: it is sent its turn, takes one optimizer step, and yields its loss."""
import torch
import torch.nn.functional as F


def critic(net, opponent, opt, source):
    turn = yield
    while True:
        real, z = source(turn, 0)
        with torch.no_grad():
            fake = opponent(z)
        loss = F.relu(1 - net(real)).mean() + F.relu(1 + net(fake)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        turn = yield loss.detach()


def artist(net, judge, opt, source):
    turn = yield
    while True:
        _, z = source(turn, 1)
        judge.requires_grad_(False)
        loss = -judge(net(z)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        judge.requires_grad_(True)
        turn = yield loss.detach()


def start(player):
    next(player)
    return player
