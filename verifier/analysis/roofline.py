"""The least time that a step can take on given GPUs: a bound, no forecast.

From a capacity run: matrix products at the best rate that was measured on the GPU (at its peak
where none is known), collectives at the peak of the link that they need, and of both only what
cannot overlap added up. No step is all made of the best: a real one takes longer.

A group of n ranks lies on m nodes with k of its ranks each. L: bytes/s of the link inside a node,
N: bytes/s of network, both of one GPU and one direction; B: bytes of the whole tensor. Each rank
must receive what the others hold, and each node what the other nodes hold:

    all-gather, reduce-scatter   (n-1)/n B / L                               one node
                                 max((m-1)/m B / (k N), (n-1)/n B / (L + N)) several: k network
                                                                             cards share it
    all-reduce                   twice that (no reduction inside switches)
    all-to-all                   max((n-k)/n B / N, (k-1)/n B / L)
    copies of offload            over PCIe, in float32: shards to the device for each all-gather,
                                 and back for each reduction
    broadcast, reduce, others    B / L on one node, B / (k N) on several

    step >= max(compute + waited + exposed, most loaded link) + optimizer

`waited`: collectives that the next operator needs (tensor parallelism, gradient norm). `exposed`:
of FSDP's own, which run beside compute, the first all-gather and the last reduction of each group.
`optimizer`: reading and writing the optimizer state once.

`eager` is the same where each operator without products is a kernel of its own, which reads and
writes memory (`moved`), as without torch.compile. A compiled script can be faster than `eager`,
never than `step`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config.devices import Device
from ..trace.events import CapacityRecord, Collective, ModuleFlops
from .capacity import STATE

PARAMETERS, GRADIENTS = "parameters", "gradients"  # purposes of FSDP's own collectives
LINK, NETWORK = "link", "network"
PRODUCTS = "products, none recomputed or masked"  # what MFU counts where no formula is known
FLOAT8 = 2  # times as fast as bfloat16
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes
# bytes/s of PCIe 5.0 x16 in one direction, where the GPU's link is another; superchips have a
# faster one
HOST_LINK = 64e9
# bytes/s of a host with two sockets of eight channels of DDR5-4800, for all GPUs of the node
HOST_MEMORY = 614.4e9
# bytes that an update of one parameter reads and writes: weight, gradient and two moments, of which
# three are written
ADAM = 28


@dataclass(frozen=True)
class Traffic:
    """What a rank sends over one group in a step, for one purpose."""

    group: str
    size: int
    nodes: int
    purpose: str  # parameters, gradients, or "" for what compute waits for
    over: str  # link or network
    collectives: int
    bytes: int  # of the whole tensors
    seconds: float


@dataclass(frozen=True)
class Ideal:
    """How long a step lasts at the nominal peak of the GPU, and what that counts of it."""

    seconds: float
    counts: str


@dataclass(frozen=True)
class Bound:
    """The least seconds of a step, and what they are made of.

    `tokens_per_second` is that of one GPU; both it and `mfu` are at most. `mfu_counts`: what is
    counted of the step's work.
    """

    device: str
    per_node: int
    compute: float
    optimizer: float
    waited: float
    exposed: float
    link: float
    network: float
    step: float
    moved: float
    eager: float
    limited_by: str  # compute or communication
    ideal: float  # seconds at the nominal peak
    mfu_counts: str
    tokens_per_second: float | None
    traffic: tuple[Traffic, ...] = field(default=())

    @property
    def mfu(self) -> float | None:
        """The part of the peak at most; None where none below it is known: kernels skip what a
        count has, such as attention behind a mask.
        """
        return self.ideal / self.step if self.step and self.ideal <= self.step else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mfu": self.mfu}


def bound(
    record: CapacityRecord, device: Device, tokens: int | None = None, ideal: Ideal | None = None
) -> Bound:
    """The bound on the last step of a capacity run.

    `tokens`: of a step for each GPU, where several ranks read the same ones. `ideal`: None for the
    products that were seen.
    """
    sent = [one for one in record.collectives if one.step == record.steps]
    found = traffic(sent, device)
    modules = list(record.flops.values())
    compute = sum(_executed(one) / attained(one.dtype, device) for one in modules)
    waited = sum(one.seconds for one in found if not one.purpose)
    exposed = _exposed(sent, device)
    loads = {
        over: sum(one.seconds for one in found if one.over == over) for over in (LINK, NETWORK)
    }
    state = max((peak.kinds.get(STATE, 0) for peak in record.peaks), default=0)
    optimizer = 2 * state / device.memory_bandwidth
    computing, sending = compute + waited + exposed, max(loads.values())
    step = max(computing, sending) + optimizer
    moved = record.moved / device.memory_bandwidth
    ideal = ideal or _of_products(modules, device)
    known = tokens or record.tokens
    return Bound(
        device=device.name,
        per_node=device.per_node,
        compute=compute,
        optimizer=optimizer,
        waited=waited,
        exposed=exposed,
        link=loads[LINK],
        network=loads[NETWORK],
        step=step,
        moved=moved,
        eager=max(computing + moved, sending) + optimizer,
        limited_by=(
            "communication" if sending > computing or waited + exposed > compute else "compute"
        ),
        ideal=ideal.seconds,
        mfu_counts=ideal.counts,
        tokens_per_second=known / step if known and step else None,
        traffic=tuple(found),
    )


def offloaded(least: Bound, record: CapacityRecord, device: Device, parameters: int) -> Bound:
    """The bound with what offload adds: copies over PCIe beside compute, and the update of this
    rank's `parameters` on the host.
    """
    pcie = "PCIe" in device.link_kind
    sent = [one for one in record.collectives if one.step == record.steps and _purpose(one)]
    copied = sum(
        one.count * one.bytes * 4 / WIDTHS.get(one.dtype, 4) / one.group_size for one in sent
    )
    copies = copied / (device.link if pcie else HOST_LINK)
    link = least.link + copies if pcie else least.link
    computing, sending = (
        least.compute + least.waited + least.exposed,
        max(link, least.network, copies),
    )
    optimizer = ADAM * parameters * device.per_node / HOST_MEMORY
    step = max(computing, sending) + optimizer
    times = step / least.step if least.step else 1.0
    return replace(
        least,
        link=link,
        optimizer=optimizer,
        step=step,
        eager=max(computing + least.moved, sending) + optimizer,
        limited_by="communication" if sending > computing else least.limited_by,
        tokens_per_second=least.tokens_per_second / times if least.tokens_per_second else None,
    )


def traffic(sent: Iterable[Collective], device: Device) -> list[Traffic]:
    """The traffic of a rank, by group and purpose, most seconds first."""
    grouped: dict[tuple[str, int, int, str], list[Collective]] = {}
    for one in sent:
        if one.group_size > 1 and one.bytes:
            grouped.setdefault((one.group, one.group_size, one.stride, _purpose(one)), []).append(
                one
            )
    found = []
    for (group, size, stride, purpose), ones in grouped.items():
        inside, nodes = layout(size, stride, device.per_node)
        found.append(
            Traffic(
                group=group,
                size=size,
                nodes=nodes,
                purpose=purpose,
                over=LINK if nodes == 1 else NETWORK,
                collectives=sum(one.count for one in ones),
                bytes=sum(one.bytes * one.count for one in ones),
                seconds=sum(
                    one.count * seconds(one.collective, one.bytes, inside, nodes, device)
                    for one in ones
                ),
            )
        )
    return sorted(found, key=lambda one: -one.seconds)


def layout(size: int, stride: int, per_node: int) -> tuple[int, int]:
    """(ranks of a group in one node, nodes of the group): its ranks are `stride` apart, nodes hold
    consecutive ranks.
    """
    inside = min(size, max(1, per_node // stride))
    return inside, -(-size // inside)


def seconds(kind: str, size: int, inside: int, nodes: int, device: Device) -> float:
    """The least time of one collective of `size` bytes over `nodes` with `inside` ranks each."""
    ranks, link, network = inside * nodes, device.link, device.network
    if kind == "all_to_all":
        return max((ranks - inside) / ranks * size / network, (inside - 1) / ranks * size / link)
    if kind not in ("all_gather", "reduce_scatter", "all_reduce"):
        return size / link if nodes == 1 else size / (inside * network)
    times = 2 if kind == "all_reduce" else 1
    if nodes == 1:
        return times * (ranks - 1) / ranks * size / link
    into_node = (nodes - 1) / nodes * size / (inside * network)
    into_rank = (ranks - 1) / ranks * size / (link + network)
    return times * max(into_node, into_rank)


def rate(dtype: str, device: Device) -> float:
    """FLOP/s at most of products of this dtype; those of float32 at the rate of TF32, which a
    script may allow.
    """
    if dtype == "float32":
        return max(device.flops["float32"], device.flops["tfloat32"])
    if dtype.startswith("float8"):
        return FLOAT8 * device.flops["bfloat16"]
    return device.flops.get(dtype) or max(device.flops.values())


def attained(dtype: str, device: Device) -> float:
    """FLOP/s of the best products of this dtype that were measured; the peak where none is
    known.
    """
    return min(device.attainable.get(dtype, math.inf), rate(dtype, device))


def _executed(one: ModuleFlops) -> int:
    """What a kernel computes: attention skips what a causal mask hides."""
    return one.forward + one.backward - one.masked


def _of_products(modules: Iterable[ModuleFlops], device: Device) -> Ideal:
    needed = ((one.forward + one.backward - one.recompute, one.dtype) for one in modules)
    return Ideal(sum(amount / rate(dtype, device) for amount, dtype in needed), PRODUCTS)


def _purpose(one: Collective) -> str:
    return one.purpose if one.purpose in (PARAMETERS, GRADIENTS) else ""


def _exposed(sent: Sequence[Collective], device: Device) -> float:
    """Seconds of the first all-gather, before any compute, and of the last reduction of gradients
    in each group, after all of it.
    """
    first = next((one for one in sent if _purpose(one) == PARAMETERS), None)
    last = {one.group: one for one in sent if _purpose(one) == GRADIENTS}
    edges = [*([first] if first else []), *last.values()]
    return sum(
        seconds(
            one.collective, one.bytes, *layout(one.group_size, one.stride, device.per_node), device
        )
        for one in edges
        if one.group_size > 1
    )
