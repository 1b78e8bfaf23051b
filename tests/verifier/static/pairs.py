"""Short scripts in pairs: `wrong` holds the fault of the rule, `right` is the nearest thing that does not."""

from __future__ import annotations

PRELUDE = """
import copy, math, os, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict, set_state_dict,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 16)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model, optimizer, batches):
    for batch in batches:
        loss = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def batches():
    rank, world = dist.get_rank(), dist.get_world_size()
    return torch.randint(0, 16, (64, 4)).split(4)[rank::world]


def fit(model):
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches())

"""

HEAD = 'dist.init_process_group("gloo")\ntorch.manual_seed(0)\n'
MODEL = HEAD + "model = shard(Net())\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"

# (rule, wrong, right)
PAIRS: list[tuple[str, str, str]] = [
    (
        "optim-before-shard",
        HEAD
        + "model = Net()\nopt = torch.optim.SGD(model.parameters(), lr=1)\nshard(model)\ntrain(model, opt, batches())",
        HEAD + "model = Net()\nopt = torch.optim.SGD(model.parameters(), lr=1)\nshard(model)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=1)\ntrain(model, opt, batches())",
    ),
    (
        "optim-before-shard",
        """
class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        self.model = Net()
        self.groups()
        self.model = shard(self.model)

    def groups(self):
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for n, p in self.model.named_parameters() if p.ndim < 2]
        self.opt = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])

trainer = Trainer()
train(trainer.model, trainer.opt, batches())
""",
        """
class Trainer:
    def __init__(self, use_fsdp):
        dist.init_process_group("gloo")
        self.model = Net()
        if use_fsdp:
            self.model = shard(self.model)
            self.opt = self.groups()
        else:
            self.opt = self.groups()

    def groups(self):
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for n, p in self.model.named_parameters() if p.ndim < 2]
        return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])

trainer = Trainer("--fsdp" in os.sys.argv)
train(trainer.model, trainer.opt, batches())
""",
    ),
    (
        "optim-built-after-forward",
        HEAD + "model = shard(Net())\nmodel(torch.zeros(1, 4, dtype=torch.long))\nfit(model)",
        HEAD + "model = shard(Net())\nmodel(torch.zeros(1, 4, dtype=torch.long))\nmodel.reshard()\nfit(model)",
    ),
    (
        "root-not-wrapped",
        HEAD + "model = Net()\nfor block in model.blocks:\n    fully_shard(block)\nfit(model)",
        HEAD
        + "model = Net()\nfor block in model.blocks:\n    fully_shard(block)\nfully_shard([model.embed, model.head])\nfit(model)",
    ),
    (
        "root-not-wrapped",
        HEAD
        + "model = Net()\nfor i, b in enumerate(reversed(model.blocks)):\n    fully_shard(b, reshard_after_forward=i > 0)\nfit(model)",
        HEAD + "model = Net()\nfor m in [*model.blocks, model]:\n    fully_shard(m)\nfit(model)",
    ),
    (
        "root-only-wrap",
        HEAD + "model = fully_shard(Net())\nfit(model)",
        HEAD + "model = Net()\nfor n, m in reversed(list(model.named_modules())):\n    if isinstance(m, Block):\n"
        "        fully_shard(m)\nfully_shard(model)\nfit(model)",
    ),
    (
        "parent-before-child",
        HEAD + "model = Net()\nfully_shard(model)\nfor block in model.blocks:\n    fully_shard(block)\nfit(model)",
        HEAD
        + "model = Net()\nfor block in model.blocks:\n    fully_shard(block.up)\n    fully_shard(block)\nfully_shard(model)\nfit(model)",
    ),
    (
        "unsupported-module-or-param",
        HEAD + "model = Net()\nfully_shard(model.blocks)\nfully_shard(model)\nfit(model)",
        HEAD + "model = Net()\nfor i in range(3):\n    fully_shard(model.blocks[i])\nfully_shard(model)\nfit(model)",
    ),
    (
        "unsupported-module-or-param",
        "class Clip(Net):\n    def __init__(self):\n        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.tensor(2.6))\n" + HEAD + "fit(shard(Clip()))",
        "class Clip(Net):\n    def __init__(self):\n        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.tensor([2.6]))\n" + HEAD + "fit(shard(Clip()))",
    ),
    (
        "deepcopy-of-fsdp-model",
        MODEL + "ema = copy.deepcopy(model)\ntrain(model, optimizer, batches())",
        HEAD + "model = Net()\nema = copy.deepcopy(model)\nshard(ema)\nshard(model)\nfit(model)",
    ),
    (
        "no-sync-idiom",
        MODEL
        + "for batch in batches():\n    with model.no_sync():\n        model(batch).sum().backward()\n    optimizer.step()",
        MODEL + "for n, batch in enumerate(batches()):\n    model.set_requires_gradient_sync(n % 2 == 1)\n"
        "    model(batch).sum().backward()\n    optimizer.step()",
    ),
    (
        "no-sync-idiom",
        MODEL + "for n, batch in enumerate(batches()):\n    model.require_backward_grad_sync = n % 2 == 1\n"
        "    model(batch).sum().backward()\n    optimizer.step()",
        MODEL + "for n, batch in enumerate(batches()):\n    model.set_requires_gradient_sync(n % 2 == 1)\n"
        "    model(batch).sum().backward()\n    optimizer.step()",
    ),
    (
        "shard-option-unread",
        HEAD + "from torch.distributed.fsdp import CPUOffload\nfit(shard(Net(), offload_policy=CPUOffload(True)))",
        HEAD + "fit(shard(Net(), offload_policy=CPUOffloadPolicy()))",
    ),
    (
        "params-added-after-shard",
        HEAD + "model = shard(Net())\nmodel.head = nn.Linear(8, 32)\nfit(model)",
        HEAD + "model = Net()\nmodel.head = nn.Linear(8, 32)\nfit(shard(model))",
    ),
    (
        "tied-weights-split-groups",
        HEAD + "model = Net()\nmodel.head.weight = model.embed.weight\nfully_shard(model.embed)\nfit(shard(model))",
        HEAD
        + "model = Net()\nmodel.head.weight = model.embed.weight\nfully_shard([model.embed, model.head])\nfit(shard(model))",
    ),
    (
        "custom-forward-bypass",
        "class Generator(Net):\n    def generate(self, x):\n        return self.head(self.embed(x))\n"
        + HEAD
        + "model = shard(Generator())\nfit(model)\nmodel.generate(torch.zeros(1, 4))",
        "class Generator(Net):\n    def generate(self, x):\n        return self.head(self.embed(x))\n"
        + HEAD
        + "model = shard(Generator())\nregister_fsdp_forward_method(model, 'generate')\nfit(model)\nmodel.generate(torch.zeros(1, 4))",
    ),
    (
        "custom-forward-bypass",
        HEAD + "model = shard(Net())\nfit(model)\nmodel.forward(torch.zeros(1, 4))",
        HEAD + "model = shard(Net())\nfit(model)\nmodel(torch.zeros(1, 4))",
    ),
    (
        "weight-used-outside-forward",
        HEAD
        + "model = Net()\nfully_shard(model.head)\nshard(model)\nfit(model)\nF.linear(torch.zeros(1, 8), model.head.weight)",
        HEAD + "model = Net()\nfully_shard(model.head)\nshard(model)\nfit(model)\n"
        "F.linear(torch.zeros(1, 8), model.head.weight.full_tensor())",
    ),
    (
        "matrix-optimizer-on-local-shard",
        """
class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad.to_local()
                p.to_local().add_(g @ g.T @ g, alpha=-group["lr"])

dist.init_process_group("gloo")
model = shard(Net())
train(model, Muon(model.parameters()), batches())
""",
        """
class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad.full_tensor()
                update = DTensor.from_local(g @ g.T @ g).redistribute(p.device_mesh, p.placements)
                p.to_local().add_(update.to_local(), alpha=-group["lr"])

dist.init_process_group("gloo")
model = shard(Net())
train(model, Muon(model.parameters()), batches())
""",
    ),
    (
        "bf16-master-weights",
        HEAD + "model = Net().to(device='cpu', dtype=torch.bfloat16)\nfit(shard(model))",
        HEAD
        + "model = Net().to(device='cpu')\nfit(shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))",
    ),
    (
        "bf16-master-weights",
        "from transformers import AutoModelForCausalLM as Auto\n"
        + HEAD
        + "model = Auto.from_pretrained('x', torch_dtype=torch.bfloat16)\nfor l in model.model.layers:\n    fully_shard(l)\n"
        "fully_shard(model)\nfit(model)",
        "from transformers import AutoModelForCausalLM as Auto\n"
        + HEAD
        + "model = Auto.from_pretrained('x', torch_dtype=torch.bfloat16).float()\nfor l in model.model.layers:\n    fully_shard(l)\n"
        "fully_shard(model)\nfit(model)",
    ),
    (
        "reduce-dtype-follows-param-dtype",
        HEAD + "kwargs = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))\nfit(shard(Net(), **kwargs))",
        HEAD + "kwargs = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))\n"
        "fit(shard(Net(), **kwargs))",
    ),
    (
        "output-dtype-on-inner-blocks",
        HEAD + "fit(shard(Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)))",
        HEAD + "inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32)\nmodel = Net()\nfor b in model.blocks:\n"
        "    fully_shard(b, mp_policy=inner)\n"
        "fit(fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)))",
    ),
    (
        "fp16-without-scaler",
        HEAD + "fit(shard(Net(), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32)))",
        HEAD
        + "scaler = torch.amp.GradScaler()\nfit(shard(Net(), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32)))",
    ),
    (
        "mixed-orig-dtype-in-group",
        HEAD + "model = Net()\nmodel.bfloat16()\nmodel.head.float()\nshard(model)\nfor b in batches():\n    model(b)",
        HEAD
        + "model = Net()\nmodel.bfloat16()\nmodel.head.float()\nfully_shard(model.head)\nshard(model)\nfor b in batches():\n    model(b)",
    ),
    (
        "rank-dependent-init-no-broadcast",
        'dist.init_process_group("gloo")\ntorch.manual_seed(42 + int(os.environ["RANK"]))\nfit(shard(Net()))',
        'dist.init_process_group("gloo")\ntorch.manual_seed(42)\nmodel = shard(Net())\n'
        'torch.manual_seed(42 + int(os.environ["RANK"]))\nfit(model)',
    ),
    (
        "rank-dependent-init-no-broadcast",
        "def seed_all(seed, rank):\n    torch.manual_seed(seed * 1000 + rank)\n"
        + HEAD
        + "seed_all(1, dist.get_rank())\nmodel = shard(Net())\nif os.path.exists('last'):\n    dcp.load(model.state_dict())\nfit(model)",
        "def seed_all(seed, rank):\n    torch.manual_seed(seed * 1000 + rank)\n"
        + HEAD
        + "seed_all(1, dist.get_rank())\nmodel = Net()\nfor p in model.parameters():\n    dist.broadcast(p.data, 0)\nfit(shard(model))",
    ),
    (
        "rank0-sd-without-broadcast",
        MODEL + "state = {}\nif dist.get_rank() == 0:\n    state = torch.load('m.pt')\n"
        "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))\ntrain(model, optimizer, batches())",
        MODEL + "state = {}\nif dist.get_rank() == 0:\n    state = torch.load('m.pt')\n"
        "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))\n"
        "train(model, optimizer, batches())",
    ),
    (
        "meta-params-not-reset",
        HEAD + "with torch.device('meta'):\n    model = Net()\nshard(model)\nmodel.to_empty(device='cpu')\nfit(model)",
        HEAD + "with torch.device('meta'):\n    model = Net()\nshard(model)\nmodel.to_empty(device='cpu')\n"
        "for m in model.modules():\n    if hasattr(m, 'reset_parameters'):\n        m.reset_parameters()\nfit(model)",
    ),
    (
        "meta-buffers-garbage",
        "class Masked(Net):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('mask', torch.ones(4), persistent=False)\n"
        + HEAD
        + "with torch.device('meta'):\n    model = Masked()\nshard(model)\nmodel.to_empty(device='cpu')\n"
        "for p in model.parameters():\n    nn.init.normal_(p)\nfit(model)",
        "class Masked(Net):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('mask', torch.ones(4), persistent=False)\n"
        + HEAD
        + "with torch.device('meta'):\n    model = Masked()\nshard(model)\nmodel.to_empty(device='cpu')\n"
        "for p in model.parameters():\n    nn.init.normal_(p)\nmodel.mask.fill_(1.0)\nfit(model)",
    ),
    (
        "same-data-on-every-rank",
        MODEL
        + "loader = DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=4, shuffle=True)\nfor (batch,) in loader:\n"
        "    model(batch).sum().backward()\n    optimizer.step()",
        MODEL
        + "data = TensorDataset(torch.zeros(64, 4))\nloader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))\n"
        "for (batch,) in loader:\n    model(batch).sum().backward()\n    optimizer.step()",
    ),
    (
        "same-data-on-every-rank",
        MODEL + "class Lines(Dataset):\n    def __getitem__(self, i):\n        return i\n"
        "loader = DataLoader(Lines(), 4)\nfor batch in loader:\n    model(batch).sum().backward()\n    optimizer.step()\n"
        "    if dist.get_rank() == 0:\n        print(batch)",
        MODEL + "class Lines(Dataset):\n    def __getitem__(self, i):\n        return i\n"
        "loader = DataLoader(Lines(), 4)\nfor batch in loader:\n    batch = batch.chunk(dist.get_world_size())[dist.get_rank()]\n"
        "    model(batch).sum().backward()\n    optimizer.step()",
    ),
    (
        "set-epoch-missing",
        MODEL
        + "data = TensorDataset(torch.zeros(64, 4))\nloader = DataLoader(data, 4, sampler=DistributedSampler(data))\n"
        "for epoch in range(3):\n    for (batch,) in loader:\n        model(batch).sum().backward()\n        optimizer.step()",
        MODEL
        + "data = TensorDataset(torch.zeros(64, 4))\nsampler = DistributedSampler(data)\nloader = DataLoader(data, 4, sampler=sampler)\n"
        "for epoch in range(3):\n    sampler.set_epoch(epoch)\n    for (batch,) in loader:\n        model(batch).sum().backward()\n"
        "        optimizer.step()",
    ),
    (
        "salted-hash-seed",
        HEAD
        + "generator = torch.Generator().manual_seed(hash('train') % 2**31)\norder = torch.randperm(64, generator=generator)",
        HEAD
        + "generator = torch.Generator().manual_seed(hash((0, 1)) % 2**31)\norder = torch.randperm(64, generator=generator)",
    ),
    (
        "sampler-rank-ignores-mesh",
        HEAD + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\nmodel = Net()\n"
        "parallelize_module(model, mesh['tp'], {})\nshard(model, mesh=mesh['dp'])\ndata = TensorDataset(torch.zeros(64, 4))\n"
        "loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))\nfit(model)",
        HEAD + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\nmodel = Net()\n"
        "parallelize_module(model, mesh['tp'], {})\nshard(model, mesh=mesh['dp'])\ndata = TensorDataset(torch.zeros(64, 4))\n"
        "dp = mesh['dp']\nsampler = DistributedSampler(data, num_replicas=dp.size(), rank=dp.get_local_rank(), shuffle=False)\nfit(model)",
    ),
    (
        "accum-never-resynced",
        MODEL + "model.set_requires_gradient_sync(False)\ntrain(model, optimizer, batches())",
        MODEL
        + "for n, b in enumerate(batches()):\n    model.set_requires_gradient_sync((n + 1) % 4 == 0)\n    model(b).sum().backward()\n"
        "    if (n + 1) % 4 == 0:\n        optimizer.step()",
    ),
    (
        "hsdp-all-reduce-left-off",
        MODEL + "model.set_requires_all_reduce(False)\ntrain(model, optimizer, batches())",
        MODEL
        + "model.set_requires_all_reduce(False)\nmodel(batches()[0]).sum().backward()\nmodel.set_requires_all_reduce(True)\n"
        "train(model, optimizer, batches())",
    ),
    (
        "grad-norm-item-partial",
        MODEL
        + "for b in batches():\n    model(b).sum().backward()\n    norms = [p.grad.norm().item() for p in model.parameters()]\n"
        "    optimizer.step()",
        MODEL + "for b in batches():\n    model(b).sum().backward()\n"
        "    norms = [p.grad.norm().full_tensor().item() for p in model.parameters()]\n    optimizer.step()",
    ),
    (
        "manual-local-norm-clip",
        MODEL
        + """
def clip(params, most):
    total = sum(p.grad.to_local().pow(2).sum() for p in params) ** 0.5
    for p in params:
        p.grad.mul_(most / total)

for b in batches():
    model(b).sum().backward()
    clip(list(model.parameters()), 1.0)
    optimizer.step()
""",
        MODEL
        + """
def clip(params, most):
    total = sum(p.grad.to_local().pow(2).sum() for p in params)
    dist.all_reduce(total)
    for p in params:
        p.grad.mul_(most / total.sqrt())

for b in batches():
    model(b).sum().backward()
    clip(list(model.parameters()), 1.0)
    optimizer.step()
""",
    ),
    (
        "rank-conditional-collective",
        MODEL + "train(model, optimizer, batches())\nif dist.get_rank() == 0:\n"
        "    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))\n    torch.save(state, 'm.pt')",
        MODEL
        + "train(model, optimizer, batches())\nstate = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))\n"
        "if dist.get_rank() == 0:\n    torch.save(state, 'm.pt')",
    ),
    (
        "rank-conditional-collective",
        MODEL
        + """
def is_main():
    return int(os.environ.get("RANK", 0)) == 0

def evaluate():
    if not is_main():
        return
    print(model(batches()[0]).mean())

train(model, optimizer, batches())
evaluate()
""",
        MODEL
        + """
def is_main():
    return int(os.environ.get("RANK", 0)) == 0

def evaluate():
    value = model(batches()[0]).mean()
    if not is_main():
        return
    print(value)

train(model, optimizer, batches())
evaluate()
""",
    ),
    (
        "rank-conditional-collective",
        MODEL
        + "for n, b in enumerate(batches()):\n    model(b).sum().backward()\n    if os.environ['LOCAL_RANK'] != '0':\n        continue\n"
        "    optimizer.step()\n    dist.barrier()",
        MODEL
        + "for n, b in enumerate(batches()):\n    model(b).sum().backward()\n    optimizer.step()\n    if os.environ['LOCAL_RANK'] != '0':\n"
        "        dist.barrier()\n    else:\n        print(n)\n        dist.barrier()",
    ),
    (
        "rank-local-control-flow",
        MODEL
        + "for b in batches():\n    loss = model(b).sum()\n    if torch.isnan(loss):\n        continue\n    loss.backward()\n    optimizer.step()",
        MODEL
        + "for b in batches():\n    loss = model(b).sum()\n    bad = torch.isnan(loss).float()\n    dist.all_reduce(bad)\n"
        "    if bad.item():\n        continue\n    loss.backward()\n    optimizer.step()",
    ),
    (
        "load-without-set",
        MODEL + "state = {'model': get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))}\n"
        "dcp.load(state, checkpoint_id='c')\ntrain(model, optimizer, batches())",
        MODEL + "state = {'model': get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))}\n"
        "dcp.load(state, checkpoint_id='c')\nset_model_state_dict(model, state['model'])\ntrain(model, optimizer, batches())",
    ),
    (
        "optim-template-empty",
        MODEL
        + "state = {'model': model.state_dict(), 'optim': optimizer.state_dict()}\ndcp.load(state, checkpoint_id='c')\n"
        "optimizer.load_state_dict(state['optim'])\ntrain(model, optimizer, batches())",
        MODEL
        + "m, o = get_state_dict(model, optimizer)\nstate = {'model': m, 'optim': o}\ndcp.load(state, checkpoint_id='c')\n"
        "set_state_dict(model, optimizer, model_state_dict=m, optim_state_dict=o)\ntrain(model, optimizer, batches())",
    ),
    (
        "lenient-load-hides-mismatch",
        MODEL + "from torch.distributed.checkpoint import DefaultLoadPlanner\nstate = model.state_dict()\n"
        "dcp.load(state, checkpoint_id='c', planner=DefaultLoadPlanner(allow_partial_load=True))\ntrain(model, optimizer, batches())",
        MODEL + "from torch.distributed.checkpoint import DefaultLoadPlanner\nstate = model.state_dict()\n"
        "dcp.load(state, checkpoint_id='c', planner=DefaultLoadPlanner())\ntrain(model, optimizer, batches())",
    ),
    (
        "lenient-load-hides-mismatch",
        MODEL
        + "set_model_state_dict(model, torch.load('m.pt'), options=StateDictOptions(full_state_dict=True, strict=False))",
        MODEL
        + "keys = set_model_state_dict(model, torch.load('m.pt'), options=StateDictOptions(full_state_dict=True, strict=False))\n"
        "assert not keys.missing_keys",
    ),
    (
        "local-shard-export",
        MODEL
        + "train(model, optimizer, batches())\nif dist.get_rank() == 0:\n    torch.save({'model': model.state_dict()}, 'm.pt')",
        MODEL
        + "train(model, optimizer, batches())\nwhole = {k: v.full_tensor() for k, v in model.state_dict().items()}\n"
        "if dist.get_rank() == 0:\n    torch.save({'model': whole}, 'm.pt')",
    ),
    (
        "per-rank-state-deduplicated",
        MODEL + "torch.manual_seed(dist.get_rank())\ntrain(model, optimizer, batches())\n"
        "dcp.save({'model': model.state_dict(), 'rng': torch.get_rng_state()}, checkpoint_id='c')",
        MODEL + "torch.manual_seed(dist.get_rank())\ntrain(model, optimizer, batches())\n"
        "dcp.save({'model': model.state_dict(), f'rng_{dist.get_rank()}': torch.get_rng_state()}, checkpoint_id='c')",
    ),
    (
        "rank-dependent-checkpoint-path",
        MODEL
        + "train(model, optimizer, batches())\ndcp.save(model.state_dict(), checkpoint_id=f'run-{time.time():.0f}')",
        MODEL
        + "train(model, optimizer, batches())\nname = [f'run-{time.time():.0f}']\ndist.broadcast_object_list(name)\n"
        "dcp.save(model.state_dict(), checkpoint_id=name[0])",
    ),
    (
        "rank-dependent-checkpoint-path",
        MODEL + "from pathlib import Path\nrank = dist.get_rank()\ntrain(model, optimizer, batches())\n"
        "dcp.save(model.state_dict(), checkpoint_id=Path('out') / f'rank{rank}')",
        MODEL + "from pathlib import Path\nrank = dist.get_rank()\ntrain(model, optimizer, batches())\n"
        "dcp.save(model.state_dict(), checkpoint_id=Path('out') / 'step3')",
    ),
    (
        "async-save-process-group",
        MODEL + "train(model, optimizer, batches())\nsaving = dcp.async_save(model.state_dict(), checkpoint_id='c')\n"
        "train(model, optimizer, batches())\nsaving.result()",
        MODEL + "group = dist.new_group(backend='gloo')\ntrain(model, optimizer, batches())\n"
        "saving = dcp.async_save(model.state_dict(), checkpoint_id='c', process_group=group)\ntrain(model, optimizer, batches())\nsaving.result()",
    ),
    (
        "incomplete-checkpoint-chosen",
        MODEL + "group = dist.new_group(backend='gloo')\ntrain(model, optimizer, batches())\n"
        "dcp.async_save(model.state_dict(), checkpoint_id='c', process_group=group)",
        MODEL + "group = dist.new_group(backend='gloo')\ntrain(model, optimizer, batches())\n"
        "dcp.async_save(model.state_dict(), checkpoint_id='c', process_group=group).result()",
    ),
    (
        "full-state-dict-oom",
        MODEL
        + "train(model, optimizer, batches())\nwhole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
        MODEL + "train(model, optimizer, batches())\n"
        "whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))",
    ),
    (
        "full-sd-into-dtensor",
        HEAD + "model = shard(Net())\nmodel.load_state_dict(torch.load('m.pt', weights_only=True))\nfit(model)",
        HEAD + "model = Net()\nmodel.load_state_dict(torch.load('m.pt', weights_only=True))\nfit(shard(model))",
    ),
    (
        "wrapper-prefix-keys",
        MODEL + "fast = torch.compile(model)\ntrain(fast, optimizer, batches())\nstate = {'model': fast.state_dict()}\n"
        "dcp.save(state, checkpoint_id='c')\nagain = {'model': model.state_dict()}\ndcp.load(again, checkpoint_id='c')\n"
        "model.load_state_dict(again['model'])",
        MODEL
        + "fast = torch.compile(model)\ntrain(fast, optimizer, batches())\nstate = {'model': model.state_dict()}\n"
        "dcp.save(state, checkpoint_id='c')\nagain = {'model': model.state_dict()}\ndcp.load(again, checkpoint_id='c')\n"
        "model.load_state_dict(again['model'])",
    ),
    (
        "scheduler-or-progress-not-restored",
        MODEL
        + """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
m, o = get_state_dict(model, optimizer)
if os.path.exists("c"):
    dcp.load({"m": m, "o": o}, checkpoint_id="c")
    set_state_dict(model, optimizer, model_state_dict=m, optim_state_dict=o)
for b in batches():
    model(b).sum().backward()
    optimizer.step()
    schedule.step()
m, o = get_state_dict(model, optimizer)
dcp.save({"m": m, "o": o}, checkpoint_id="c")
""",
        MODEL
        + """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
m, o = get_state_dict(model, optimizer)
if os.path.exists("c"):
    state = {"m": m, "o": o, "s": schedule.state_dict()}
    dcp.load(state, checkpoint_id="c")
    set_state_dict(model, optimizer, model_state_dict=m, optim_state_dict=o)
    schedule.load_state_dict(state["s"])
for b in batches():
    model(b).sum().backward()
    optimizer.step()
    schedule.step()
m, o = get_state_dict(model, optimizer)
dcp.save({"m": m, "o": o, "s": schedule.state_dict()}, checkpoint_id="c")
""",
    ),
    (
        "step0-save-advances-adam",
        MODEL
        + "m, o = get_state_dict(model, optimizer)\ndcp.save({'m': m, 'o': o}, checkpoint_id='step0')\ntrain(model, optimizer, batches())",
        MODEL + "dcp.save({'m': model.state_dict()}, checkpoint_id='step0')\ntrain(model, optimizer, batches())",
    ),
    (
        "mesh-argument-wrong",
        HEAD
        + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp_shard', 'dp_replicate'))\nfit(shard(Net(), mesh=mesh))",
        HEAD
        + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp_replicate', 'dp_shard'))\nfit(shard(Net(), mesh=mesh))",
    ),
    (
        "mesh-argument-wrong",
        HEAD + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\nmodel = Net()\n"
        "parallelize_module(model, mesh['tp'], {})\nfit(shard(model, mesh=mesh))",
        HEAD + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\nmodel = Net()\n"
        "parallelize_module(model, mesh['tp'], {})\nfit(shard(model, mesh=mesh['dp']))",
    ),
    (
        "mesh-argument-wrong",
        HEAD
        + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\nmodel = shard(Net(), mesh=mesh['dp'])\n"
        "parallelize_module(model, mesh['tp'], {})\nfit(model)",
        HEAD + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\nmodel = Net()\n"
        "parallelize_module(model, mesh['tp'], {})\nshard(model, mesh=mesh['dp'])\nfit(model)",
    ),
    (
        "cpu-offload-nccl-only",
        "dist.init_process_group(backend='nccl')\ntorch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "fit(shard(Net(), offload_policy=CPUOffloadPolicy()))",
        "dist.init_process_group(backend='cpu:gloo,cuda:nccl')\ntorch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "fit(shard(Net(), offload_policy=CPUOffloadPolicy()))",
    ),
    (
        "cpu-offload-nccl-only",
        "dist.init_process_group('nccl', device_id=torch.device('cuda', int(os.environ['LOCAL_RANK'])))\n"
        "fit(shard(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False)))",
        "backend = 'nccl' if torch.cuda.is_available() else 'gloo'\ndist.init_process_group(backend)\n"
        "device = torch.device('cuda', int(os.environ['LOCAL_RANK'])) if torch.cuda.is_available() else torch.device('cpu')\n"
        "fit(shard(Net().to(device), offload_policy=CPUOffloadPolicy()))",
    ),
    (
        "set-device-missing",
        "dist.init_process_group('nccl')\nmodel = Net().cuda()\nfit(shard(model))",
        "dist.init_process_group('nccl')\nmesh = init_device_mesh('cuda', (dist.get_world_size(),))\nmodel = Net().cuda()\n"
        "fit(shard(model, mesh=mesh))",
    ),
    (
        "set-device-missing",
        "dist.init_process_group('nccl')\ndevice = torch.device('cuda')\nmodel = Net().to(device)\nfit(shard(model))",
        "local = int(os.environ['LOCAL_RANK'])\ntorch.cuda.set_device(local)\ndist.init_process_group('nccl')\n"
        "model = Net().to('cuda')\nfit(shard(model))",
    ),
    (
        "ac-compile-order",
        HEAD
        + "model = Net()\nfor i, b in enumerate(model.blocks):\n    fully_shard(b)\n    model.blocks[i] = checkpoint_wrapper(b)\n"
        "fully_shard(model)\nfit(model)",
        HEAD
        + "model = Net()\nfor i, b in enumerate(model.blocks):\n    b = checkpoint_wrapper(b)\n    b.compile()\n    model.blocks[i] = b\n"
        "    fully_shard(b)\nfully_shard(model)\nfit(model)",
    ),
    (
        "ac-compile-order",
        HEAD
        + "model = Net()\nfor i, b in enumerate(model.blocks):\n    model.blocks[i] = checkpoint_wrapper(torch.compile(b))\n"
        "    fully_shard(model.blocks[i])\nfully_shard(model)\nfit(model)",
        HEAD
        + "model = Net()\nfor i, b in enumerate(model.blocks):\n    model.blocks[i] = torch.compile(checkpoint_wrapper(b))\n"
        "    fully_shard(model.blocks[i])\nfully_shard(model)\nfit(model)",
    ),
    (
        "optim-before-shard",
        HEAD + "model = Net()\ndecay = [p for p in model.parameters() if p.ndim > 1]\nshard(model)\n"
        "train(model, torch.optim.AdamW(decay), batches())",
        HEAD + "model = Net()\ndecay = (p for p in model.parameters() if p.ndim > 1)\nshard(model)\n"
        "train(model, torch.optim.AdamW(decay), batches())",
    ),
    (
        "root-not-wrapped",
        HEAD
        + "model = Net()\nfor m in model.modules():\n    if isinstance(m, (Block,)):\n        fully_shard(m)\nfit(model)",
        HEAD
        + "model = Net()\nfor m in model.modules():\n    if isinstance(m, (Block, Net)):\n        fully_shard(m)\nfit(model)",
    ),
    (
        "tied-weights-split-groups",
        HEAD
        + "model = Net()\nmodel.head.weight = model.embed.weight\nfor m in (model.embed, *model.blocks, model):\n    fully_shard(m)\nfit(model)",
        HEAD
        + "model = Net()\nmodel.head.weight = model.embed.weight\nfor m in (*model.blocks, model):\n    fully_shard(m)\nfit(model)",
    ),
    (
        "local-shard-export",
        MODEL
        + "state = get_model_state_dict(model)\nif dist.get_rank() == 0:\n    torch.save({k: v.to_local() for k, v in state.items()}, 'm.pt')",
        MODEL + "state = get_model_state_dict(model)\ntorch.save(state, f'm{dist.get_rank()}.pt')",
    ),
    (
        "local-shard-export",
        MODEL + "torch.save(model.state_dict(), os.path.join('out', 'm.pt'))",
        MODEL + "torch.save(Net().state_dict(), os.path.join('out', 'm.pt'))",
    ),
    (
        "full-sd-into-dtensor",
        HEAD
        + "other = Net()\nmodel = shard(Net())\nmodel.load_state_dict({k: v.clone() for k, v in other.state_dict().items()})\nfit(model)",
        HEAD
        + "other = shard(Net())\nmodel = shard(Net())\nmodel.load_state_dict({k: v.clone() for k, v in other.state_dict().items()})\nfit(model)",
    ),
    (
        "rank-local-control-flow",
        MODEL
        + "for b in batches():\n    loss = model(b).sum()\n    loss.backward()\n    optimizer.step()\n    if loss.item() < 0.1:\n        break",
        MODEL
        + "for n, b in enumerate(batches()):\n    loss = model(b).sum()\n    loss.backward()\n    optimizer.step()\n"
        "    if loss.item() < 0.1:\n        print('low')\n    if n > 3:\n        break",
    ),
    (
        "optim-template-empty",
        """
class State:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])

"""
        + MODEL
        + "dcp.load({'all': State(model, optimizer)}, checkpoint_id='c')\ntrain(model, optimizer, batches())",
        """
class State:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

"""
        + MODEL
        + "dcp.load({'all': State(model, optimizer)}, checkpoint_id='c')\ntrain(model, optimizer, batches())",
    ),
    (
        "ddp-around-fsdp",
        MODEL + "from torch.nn.parallel import DistributedDataParallel as DDP\ntrain(DDP(model), optimizer, batches())",
        MODEL
        + "from torch.nn.parallel import DistributedDataParallel as DDP\nother = DDP(Net())\ntrain(model, optimizer, batches())",
    ),
    (
        "sharded-twice",
        HEAD + "model = shard(Net())\nfully_shard(model)\nfit(model)",
        HEAD
        + "model = Net()\nif len(os.sys.argv) > 1:\n    shard(model)\nelse:\n    shard(model, reshard_after_forward=False)\nfit(model)",
    ),
    (
        "pickled-fsdp-model",
        MODEL
        + "train(model, optimizer, batches())\nif dist.get_rank() == 0:\n    torch.save({'model': model}, 'm.pt')",
        HEAD + "model = Net()\ntorch.save(model, 'm.pt')\nfit(shard(model))",
    ),
    (
        "fsdp1-idiom",
        MODEL
        + "for b in batches():\n    model(b).sum().backward()\n    model.clip_grad_norm_(1.0)\n    optimizer.step()",
        MODEL
        + "for b in batches():\n    model(b).sum().backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()",
    ),
    (
        "lowbit-or-unsupported-optimizer",
        HEAD + "model = shard(Net())\ntrain(model, torch.optim.Adafactor(model.parameters()), batches())",
        HEAD + "model = Net()\ntrain(model, torch.optim.Adafactor(model.parameters()), batches())",
    ),
    (
        "parameter-replaced-after-shard",
        HEAD + "model = shard(Net())\nmodel.head.weight = nn.Parameter(torch.zeros(16, 8))\nfit(model)",
        HEAD + "model = Net()\nmodel.head.weight = nn.Parameter(torch.zeros(16, 8))\nfit(shard(model))",
    ),
    (
        "parameter-replaced-after-shard",
        HEAD
        + "model = shard(Net())\nmodel.load_state_dict(torch.load('m.pt', weights_only=True), assign=True)\nfit(model)",
        HEAD
        + "model = Net()\nmodel.load_state_dict(torch.load('m.pt', weights_only=True), assign=True)\nfit(shard(model))",
    ),
    (
        "submodule-forward-before-root",
        HEAD + "model = shard(Net())\nmodel.blocks[0](torch.zeros(1, 8))\nfit(model)",
        HEAD + "model = Net()\nmodel.blocks[0](torch.zeros(1, 8))\nfit(shard(model))",
    ),
]
