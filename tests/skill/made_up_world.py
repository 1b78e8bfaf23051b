"""Run with the folders of generated projects: one step of each model, as rank 0 of a made-up world;
prints what was seen as JSON.

The process group is torch's own fake one: nothing is sent, and what would be sent is counted.
"""

import json
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

OWN = ("distributed", "model")
GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"
OPS = ("mm.default", "silu.default", "_scaled_dot_product_flash_attention_for_cpu.default")


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(comm, name):
    return sum(number for op, number in comm.get_comm_counts().items() if name in str(op))


def seen(folder, world):
    sys.path.insert(0, folder)
    for name in OWN:
        sys.modules.pop(name, None)
    import distributed
    import model as module

    device = torch.device("cpu")
    try:
        mesh = distributed.build_mesh(device)
        if hasattr(module, "ModelConfig"):
            net = module.build_model(module.ModelConfig(), mesh, device, 0)
        else:
            net = module.build_model(mesh, 0)
    except distributed.SetupError as error:
        return {"refused": str(error)}
    finally:
        sys.path.remove(folder)
    layout = {
        "names": [name for name, _ in net.named_parameters()],
        "keys": list(net.state_dict()),
        "shapes": {name: list(param.to_local().shape) for name, param in net.named_parameters()},
        "compiled": [block._compiled_call_impl is not None for block in getattr(net, "blocks", [])],
        "groups": len(dist.distributed_c10d._world.pg_map),
    }
    if any(layout["compiled"]):
        return layout  # to compile takes long
    with CommDebugMode() as comm:
        loss = net(torch.zeros(2, 16, dtype=torch.int64)).sum()
        forward = counted(comm, GATHER)
        with Calls() as calls:
            (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).backward()
    return {
        **layout,
        "gathers": [forward, counted(comm, GATHER) - forward],
        "scatters": counted(comm, SCATTER),
        "backward": {name: calls.seen[name] for name in OPS},
    }


def main():
    world = int(sys.argv[1])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    print(json.dumps([seen(folder, world) for folder in sys.argv[2:]]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
