"""Image classification in the style of the classic ImageNet example, small and synthetic."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES, SIDE = 10, 8


class BasicBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, c), nn.GroupNorm(2, c)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class SmallResNet(nn.Module):
    def __init__(self, c=12, depth=2):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(BasicBlock(c) for _ in range(depth))
        self.fc = nn.Linear(c * (SIDE // 2) ** 2, CLASSES)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.fc(x.flatten(1))


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self):
        self.val = self.sum = self.count = self.avg = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def accuracy(output, target, topk=(1,)):
    _, pred = output.topk(max(topk), 1)
    correct = pred.eq(target[:, None])
    return [correct[:, :k].any(1).float().mean() * 100 for k in topk]


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt)
    return rt / dist.get_world_size()


def make_data(n, seed, templates):
    gen = torch.Generator().manual_seed(seed)
    y = torch.arange(n) * CLASSES // n          # sorted by class, like folders on disk
    x = 0.55 * templates[y] + torch.randn(n, 3, SIDE, SIDE, generator=gen)
    return TensorDataset(x, y)


def train(loader, model, criterion, optimizer, epoch, args, device):
    batch_time, losses, top1, top5 = (AverageMeter() for _ in range(4))
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device), target.to(device)
        output = model(images)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        prec1, prec5 = accuracy(output.detach(), target, topk=(1, 5))
        reduced_loss = reduce_tensor(loss.detach())
        prec1, prec5 = reduce_tensor(prec1), reduce_tensor(prec5)
        losses.update(reduced_loss.item(), images.size(0))
        top1.update(prec1.item(), images.size(0))
        top5.update(prec5.item(), images.size(0))
        batch_time.update(time.time() - end)
        end = time.time()
    if args.rank == 0:
        print(f"Epoch: [{epoch}]  Loss {losses.avg:.6f}  Prec@1 {top1.avg:.3f}  "
              f"Prec@5 {top5.avg:.3f}", flush=True)


@torch.no_grad()
def validate(loader, model, criterion, args, device):
    losses, top1, top5 = (AverageMeter() for _ in range(3))
    model.eval()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device), target.to(device)
        output = model(images)
        loss = criterion(output, target)

        prec1, prec5 = accuracy(output, target, topk=(1, 5))
        reduced_loss = reduce_tensor(loss)
        reduced_prec1 = reduce_tensor(prec1)
        reduced_prec5 = reduce_tensor(prec5)
        losses.update(reduced_loss.item(), images.size(0))
        top1.update(reduced_prec1.item(), images.size(0))
        top5.update(reduced_prec5.item(), images.size(0))
    if args.rank == 0:
        print(f" * Loss {losses.avg:.6f}  Prec@1 {top1.avg:.3f}  Prec@5 {top5.avg:.3f}", flush=True)
    return top1.avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("-b", "--batch-size", type=int, default=40, help="over all processes")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(4)
    templates = torch.randn(CLASSES, 3, SIDE, SIDE)
    train_set, val_set = make_data(320, 1, templates), make_data(160, 2, templates)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    per_rank = args.batch_size // args.world_size
    train_loader = DataLoader(train_set, batch_size=per_rank, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=per_rank, sampler=val_sampler)

    model = SmallResNet().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    best_prec1, best_epoch = 0.0, -1
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args, device)
        scheduler.step()
        prec1 = validate(val_loader, model, criterion, args, device)
        if prec1 > best_prec1:
            best_prec1, best_epoch = prec1, epoch
    if args.rank == 0:
        print(f"best Prec@1 {best_prec1:.3f} (epoch {best_epoch})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
