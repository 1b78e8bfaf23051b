"""Run under torchrun with the folders of generated projects: loss and gradients of each model as it
is and as it is compiled; rank 0 prints for each how far they are apart, and what was compiled.

`aot_eager` compiles all but the kernels: the gradients are torch.compile's, and must be those of
eager to the last bit.
"""

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters

OWN = (
    "context_parallel",
    "data",
    "distributed",
    "expert_parallel",
    "experts",
    "loss",
    "model",
)


def gradients(net):
    """Of the second of two micro-batches: compiled blocks have seen the shapes then."""
    torch.manual_seed(1)
    tokens = torch.randint(64, (2, 16))
    for _ in range(2):
        net.zero_grad()
        out = net(tokens)
        logits = getattr(out, "logits", out)
        whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        F.cross_entropy(
            whole.flatten(0, 1).float(), tokens[:, : whole.shape[1]].flatten()
        ).backward()
    return {name: param.grad.full_tensor() for name, param in net.named_parameters()}


def compared(folder):
    sys.path.insert(0, folder)
    for name in OWN:
        sys.modules.pop(name, None)
    import distributed
    import model as module

    device = torch.device("cpu")
    config = [module.ModelConfig()] if hasattr(module, "ModelConfig") else []
    net = module.build_model(*config, distributed.build_mesh(device), device, 0)
    sys.path.remove(folder)
    with torch.compiler.set_stance("force_eager"):
        wanted = gradients(net)
    torch.compiler.reset()
    counters.clear()
    found = gradients(net)
    return {
        "zero": [name for name, grad in wanted.items() if not grad.any()],
        "apart": max((grad - found[name]).abs().max().item() for name, grad in wanted.items()),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def main():
    torch.compile = partial(torch.compile, backend="aot_eager")
    dist.init_process_group("gloo")
    found = [compared(folder) for folder in sys.argv[1:]]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
