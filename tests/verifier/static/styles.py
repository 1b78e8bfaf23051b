"""Right code as different people write it: nothing of it may be hit."""

from __future__ import annotations

TITAN = """
import contextlib, os, time
import torch
import torch.distributed as dist
from torch.distributed._composable.fsdp import CPUOffloadPolicy, fully_shard, MixedPrecisionPolicy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as ptd_checkpoint_wrapper
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel


def parallelize_llama(model, world_mesh, job):
    if job.tp > 1:
        parallelize_module(model, world_mesh["tp"], {"tok_embeddings": RowwiseParallel()})
        for layer_id, block in model.layers.items():
            parallelize_module(block, world_mesh["tp"], {"attention.wq": ColwiseParallel()})
    for layer_id, block in model.layers.named_children():
        block = ptd_checkpoint_wrapper(block, preserve_rng_state=False)
        model.layers.register_module(layer_id, block)
    if job.compile:
        for layer_id, block in model.layers.named_children():
            block = torch.compile(block, fullgraph=True)
            model.layers.register_module(layer_id, block)
    names = ("dp_replicate", "dp_shard_cp") if job.replicate else ("dp_shard_cp",)
    apply_fsdp(model, world_mesh[tuple(names)], param_dtype=torch.bfloat16, reduce_dtype=torch.float32, offload=job.offload)
    return model


def apply_fsdp(model, dp_mesh, param_dtype, reduce_dtype, offload):
    fsdp_config = {"mesh": dp_mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
    if offload:
        fsdp_config["offload_policy"] = CPUOffloadPolicy()
    for layer_id, block in model.layers.items():
        fully_shard(block, **fsdp_config, reshard_after_forward=int(layer_id) < len(model.layers) - 1)
    fully_shard([model.norm, model.output], **fsdp_config, reshard_after_forward=False)
    fully_shard(model, **fsdp_config)


class Trainer:
    def __init__(self, job):
        device = torch.device(f"cuda:{int(os.environ['LOCAL_RANK'])}")
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        mesh = job.build_mesh()
        with torch.device("meta"):
            model = job.model_cls.from_model_args(job.model_args)
        parallelize_llama(model, mesh, job)
        model.to_empty(device="cpu" if job.offload else "cuda")
        with torch.no_grad():
            model.init_weights(buffer_device=device)
        model.train()
        self.model, self.mesh = model, mesh
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, fused=True)
        self.pp_rank = mesh["pp"].get_local_rank()

    def train_step(self, batch, pp_has_last_stage):
        if self.pp_rank == 0:
            pred = self.model(batch)
        elif pp_has_last_stage:
            pred = self.model(None)
        loss = pred.mean()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, grad_norm


def main(job):
    trainer = Trainer(job)
    for step, batch in enumerate(job.loader()):
        loss, norm = trainer.train_step(batch, True)
        if step % 10 == 0:
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(step, loss.item(), norm.item(), f"{time.time():.0f}")


if __name__ == "__main__":
    import config
    main(config.load())
"""

RECIPE = '''
"""Rank 0 reads the weights; a recipe with LoRA, an evaluation and an export."""
import argparse, math, random, sys
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import distributed as dist, nn
from torch.distributed import init_process_group, destroy_process_group
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from peft import LoraConfig, get_peft_model


def is_rank_zero() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def log(*words):
    if is_rank_zero():
        print(*words, file=sys.stderr)


class LoRARecipe:
    def __init__(self, cfg: argparse.Namespace) -> None:
        self.cfg = cfg
        self.is_cuda = torch.cuda.is_available()
        init_process_group("nccl" if self.is_cuda else "gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", self.rank % max(torch.cuda.device_count(), 1)) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        random.seed(cfg.seed + self.rank)
        np.random.seed(cfg.seed + self.rank)
        torch.manual_seed(cfg.seed)
        self._model = self._setup_model()
        self._optimizer = torch.optim.AdamW([p for p in self._model.parameters() if p.requires_grad], lr=cfg.lr)
        self._scheduler = get_cosine_schedule_with_warmup(self._optimizer, 10, 100)
        torch.manual_seed(cfg.seed + 1 + self.rank)
        self._sampler, self._dataloader = self._setup_data()

    def _setup_model(self) -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(self.cfg.name, torch_dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=8))
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "lora_" in name
        for module in reversed(list(model.modules())):
            if type(module).__name__ in self.cfg.blocks:
                fully_shard(module)
        fully_shard(model)
        return model

    def _setup_data(self):
        data = self.cfg.dataset()
        sampler = DistributedSampler(data, num_replicas=self.world_size, rank=self.rank, shuffle=True, seed=0)
        return sampler, DataLoader(data, batch_size=4, sampler=sampler, collate_fn=lambda rows: rows)

    @torch.inference_mode()
    def evaluate(self) -> float:
        total = torch.zeros(2, device=self.device)
        for batch in self._dataloader:
            total[0] += self._model(**batch).loss
            total[1] += 1
        dist.all_reduce(total)
        mean = (total[0] / total[1]).item()
        if math.isnan(mean):
            raise SystemExit("diverged")
        return mean

    def train(self) -> None:
        for epoch in range(self.cfg.epochs):
            self._sampler.set_epoch(epoch)
            bar = tqdm(self._dataloader, disable=not is_rank_zero())
            for n, batch in enumerate(bar):
                last = (n + 1) % self.cfg.accumulate == 0
                self._model.set_requires_gradient_sync(last)
                loss = self._model(**batch).loss / self.cfg.accumulate
                loss.backward()
                if not last:
                    continue
                norm = nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
                if hasattr(norm, "full_tensor"):
                    norm = norm.full_tensor()
                if not torch.isfinite(norm):
                    self._optimizer.zero_grad()
                    continue
                self._optimizer.step()
                self._scheduler.step()
                self._optimizer.zero_grad(set_to_none=True)
                if self.rank == 0 and n % 10 == 0:
                    bar.set_description(f"loss {loss.item():.3f} norm {norm.item():.3f}")
            log("evaluated:", self.evaluate())
            self.save(epoch)

    def save(self, epoch: int) -> None:
        options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = dsd.get_model_state_dict(self._model, options=options)
        state = {key: value for key, value in state.items() if "lora_" in key}
        if is_rank_zero():
            folder = Path(self.cfg.out) / f"epoch_{epoch}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / "adapter.pt")
        dist.barrier()

    def load(self, path: str) -> None:
        state = {}
        if is_rank_zero():
            state = torch.load(path, weights_only=True, mmap=True)
        options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        dsd.set_model_state_dict(self._model, state, options=options)


def recipe_main(argv: Optional[list[str]] = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    cfg = parser.parse_args(argv)
    recipe = LoRARecipe(cfg)
    recipe.train()
    destroy_process_group()


if __name__ == "__main__":
    sys.exit(recipe_main())
'''

PLAIN = """
import functools, itertools, os, datetime
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
import torch.distributed.checkpoint as DCP
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard, FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor, Shard
from torch.utils.data import IterableDataset, DataLoader

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
DDP = WORLD > 1
MASTER = RANK == 0


class Tokens(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        generator = torch.Generator().manual_seed(1234 + self.rank)
        while True:
            yield torch.randint(0, 100, (17,), generator=generator)


class MLP(nn.Module):
    def __init__(self, n=8, d=32):
        super().__init__()
        self.inp = nn.Embedding(100, d)
        self.layers = nn.ModuleDict({str(i): nn.Linear(d, d) for i in range(n)})
        self.out = nn.Linear(d, 100)
        self.register_buffer("step", torch.zeros(()), persistent=False)

    def init(self):
        for p in self.parameters():
            nn.init.trunc_normal_(p, std=0.02)
        self.step.zero_()

    def forward(self, x, y=None):
        h = self.inp(x)
        for layer in self.layers.values():
            h = h + layer(h).relu()
        logits = self.out(h)
        return logits if y is None else F.cross_entropy(logits.view(-1, 100), y.view(-1))

    @torch.no_grad()
    def generate(self, x, n):
        for _ in range(n):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], dim=1)
        return x


class App(Stateful):
    def __init__(self, model, optimizer, schedule):
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.step = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]


@functools.cache
def run_name():
    name = [datetime.datetime.now().isoformat() if MASTER else None]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def clip_(parameters, limit):
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
    return total


def main():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(backend=backend, timeout=datetime.timedelta(minutes=5))
    mesh = dist.device_mesh.init_device_mesh(device.split(":")[0], (WORLD,), mesh_dim_names=("dp",))
    torch.manual_seed(1337)
    with torch.device("meta"):
        model = MLP()
    for layer in itertools.chain(model.layers.values(), [model]):
        fully_shard(layer, mesh=mesh)
    model.to_empty(device=device)
    model.init()
    ema = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: min(1.0, (it + 1) / 10))
    app = App(model, optimizer, schedule)
    if os.path.exists("latest/.metadata"):
        DCP.load({"app": app}, checkpoint_id="latest")
    group = dist.new_group(backend="gloo")
    pending = None
    for step, batch in enumerate(DataLoader(Tokens(RANK, WORLD), batch_size=4)):
        if step <= app.step:
            continue
        batch = batch.to(device, non_blocking=True)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = clip_(list(model.parameters()), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        for n, p in model.named_parameters():
            ema[n].lerp_(p.detach(), 0.01)
        app.step = step
        stop = torch.tensor(float(loss.item() < 0.1))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        if step % 100 == 0:
            if pending is not None:
                pending.result()
            pending = DCP.async_save({"app": app}, checkpoint_id=f"{run_name()}/{step}", process_group=group)
            sample = model.generate(batch[:1, :1], 8)
            mine = [p.grad.norm().full_tensor().item() for p in model.parameters() if p.grad is not None]
            if MASTER:
                print(step, f"{loss.item():.4f} {norm.item():.3f}", sample.tolist(), sum(mine))
    if pending:
        pending.result()
    dist.destroy_process_group() if DDP else None


if __name__ == "__main__":
    main()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    gathered = accelerator.gather(loss.detach())
    if accelerator.is_main_process:
        print(epoch, gathered.mean().item())
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save(state, "model.pt")
"""

DISTILL = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as shard, MixedPrecisionPolicy as MP
from torch.distributed.device_mesh import init_device_mesh

class Layer(nn.Sequential):
    def __init__(self, d):
        super().__init__(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

class Body(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.body = nn.Sequential(*[Layer(d) for _ in range(n)])
        self.out = nn.Linear(d, d)
    def forward(self, x):
        return self.out(self.body(x))

def wrap(net, **how):
    [shard(layer, **how) for layer in net.body]
    return shard(net, **how)

def main():
    dist.init_process_group()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    teacher, student = Body(16, 4), Body(16, 2)
    teacher.requires_grad_(False).eval()
    teacher = wrap(teacher.to(torch.bfloat16), mesh=mesh, mp_policy=MP(param_dtype=torch.bfloat16))
    student = wrap(student, mesh=mesh)
    heads, rest = [], []
    for name, p in student.named_parameters():
        (heads if name.startswith("out") else rest).append(p)
    optimizers = [torch.optim.SGD(heads, lr=0.1), torch.optim.AdamW(rest)]
    torch.manual_seed(1 + dist.get_rank())
    for step in range(10):
        x = torch.randn(4, 16)
        with torch.no_grad():
            goal = teacher(x.bfloat16()).float()
        loss = nn.functional.mse_loss(student(x), goal)
        try:
            loss.backward()
        except RuntimeError:
            print("rank", dist.get_rank(), "failed")
            raise
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = {k: v.full_tensor().cpu() if hasattr(v, "full_tensor") else v for k, v in student.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(whole, "student.pt")

main()
"""

RIGHT = {"titan": TITAN, "recipe": RECIPE, "plain": PLAIN, "accelerate": ACCELERATE, "distill": DISTILL}
