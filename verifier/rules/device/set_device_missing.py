from collections.abc import Iterator

from ...finding import Hit
from ...source.events import Flow
from ...source.looks import made_by, names_in, text
from ...source.looks_device import is_nccl, process_groups
from ...source.registry import detector
from ...source.values import Value, choices
from ..base import SourceRule


class SetDeviceMissing(SourceRule):
    """Every rank chooses its own GPU before anything is put on one.

    Why: `.cuda()` and `.to("cuda")` mean the current device, and that is GPU 0 in every process until somebody says
    otherwise. All ranks of a node then fill one GPU, or NCCL stops with "Duplicate GPU detected".
    Wrong:
        def build():
            dist.init_process_group("nccl")
            return shard(Decoder().cuda())
    Right:
        def build():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
            return shard(Decoder().to(device))
    Fix: Call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first, and give `init_process_group` the
    `device_id`.
    Source: awslabs/awsome-distributed-ai#1041; verl-project/verl#1752; pytorch#175531. `init_device_mesh("cuda", ...)`
    chooses a device itself, if nothing was put on a GPU before.
    Torch: read from the sources alone; not run, it needs two GPUs.
    """

    named_by = ("cuda", "nccl")


@detector("set-device-missing")
def set_device_missing(flow: Flow) -> Iterator[Hit]:
    """A module goes to the current GPU before anything has said which one that is."""
    groups = process_groups(flow)
    if not flow.certain or not flow.roots or not groups or not all(is_nccl(e) for e in groups):
        return
    words = (
        "set_device",
        "device_id",
        "CUDA_VISIBLE_DEVICES",
        "with torch.cuda.device",
        "set_default_device",
        "device_index",
    )
    if names_in(flow, *words):
        return
    meshes = flow.ops("dist.init_device_mesh")
    for event in flow.methods("cuda", "to"):
        if event.on is None or not flow.is_module(event.on) or (meshes and meshes[0].index < event.index):
            continue
        bare = event.method == "cuda" and not event.args and not event.kwargs and not event.open
        if bare or (event.method == "to" and _bare_cuda(event.arg(0, "device"))):
            told = f"{text(event.node)}: no rank has chosen its GPU, so all of them use the first"
            yield flow.hit("set-device-missing", told, event)
            return


def _bare_cuda(value: Value | None) -> bool:
    """Whether a device is "cuda" without a number."""
    made = made_by(value, "torch.device")
    named = made.args[0] if made is not None and len(made.args) == 1 else value
    return named is not None and all(one.kind == "const" and one.const == "cuda" for one in choices(named))
