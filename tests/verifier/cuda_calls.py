"""What training code for GPUs calls, in a process with CUDA on the CPU.

Run by test_cuda_on_cpu.py: prints the errors as JSON.

`EXPRESSIONS` and the checks of tests/verifier/cuda_calls.md must be true; each function below BLOCKS
must not raise.
"""

import contextlib
import copy  # noqa: F401 (used by EXPRESSIONS)
import io
import json
import os
import pickle  # noqa: F401
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

JAGGED = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)
EXPRESSIONS = """
torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.cuda.is_initialized() is not None
torch.cuda.set_device(1) is None and torch.cuda.current_device() == 1
torch.backends.cuda.is_flash_attention_available() and int(torch.version.cuda.split(".")[0]) >= 12
torch.nn.attention.bias.causal_lower_right(4, 8).seq_len_kv == 8
torch.cuda.power_draw() == torch.cuda.temperature() == torch.cuda.clock_rate() == torch.cuda.memory_usage() == 0
torch.empty(3, device="cuda").device == torch.device("cuda", 1)
torch.cuda.set_device("cuda:0") is None and torch.cuda.current_device() == 0
torch.device(0) == torch.device("cuda:0") and isinstance(torch.device("cuda"), torch.device)
torch.zeros(3, device=1).device.index == 1
torch.ones(3).cuda().device.type == "cuda" and torch.ones(3).cuda(1).get_device() == 1
torch.ones(3).to("cuda").is_cuda and torch.ones(3).to(0).is_cuda and not torch.ones(3).is_cuda
torch.ones(2).to("cuda", torch.bfloat16).dtype == torch.bfloat16
torch.ones(2).to(dtype=torch.half, device="cuda").dtype == torch.half
torch.ones(2).to(torch.ones(1, device="cuda", dtype=torch.float64)).dtype == torch.float64
torch.ones(2).to(torch.ones(1, device="cuda")).is_cuda
not torch.ones(2, device="cuda").type_as(torch.ones(1)).is_cuda and torch.ones(2).type_as(torch.ones(1, device="cuda")).is_cuda
torch._C._nn._parse_to(1)[0] == torch.device("cuda", 1) and torch._C._nn._parse_to(torch.half)[1] == torch.half
torch.ones(2, device="cuda").type() == "torch.cuda.FloatTensor" and torch.ones(2).type() == "torch.FloatTensor"
torch.ones(2).type("torch.cuda.HalfTensor").is_cuda and torch.ones(2).type(torch.half).dtype == torch.half
(lambda x: x.to("cuda") is x and x.cuda() is x and x.cpu() is not x)(torch.ones(2, device="cuda"))
(lambda n: n.to("cuda").offsets().is_cuda and n.to("cuda").values().is_cuda and not n.offsets().is_cuda)(JAGGED)
(lambda n: not n.cpu().offsets().is_cuda and not n.cpu().is_cuda and n.is_cuda)(JAGGED.cuda())
torch.tensor([1.0], device="cuda").is_cuda and torch.as_tensor([1.0], device="cuda").is_cuda
torch.asarray([1.0], device="cuda").is_cuda and torch.arange(3, device="cuda").is_cuda
torch.ones(3, device="cuda").new_tensor([2]).is_cuda and torch.ones(3, device="cuda").new_zeros(2).is_cuda
torch.ones_like(torch.ones(2, device="cuda")).is_cuda and not torch.ones_like(torch.ones(2, device="cuda"), device="cpu").is_cuda
(torch.ones(2, device="cuda") + 1)[1:].is_cuda and not (torch.ones(2) + 1).is_cuda
torch.ones(3).pin_memory().to("cuda", non_blocking=True).is_cuda
(lambda x: x.pin_memory() is not x and x.pin_memory().pin_memory().is_pinned() and not x.is_pinned())(torch.ones(3))
fails(lambda: torch.empty(3, device="cuda", pin_memory=True), "Only dense CPU tensors can be pinned")
nn.LSTM(2, 2).cuda()(torch.ones(1, 1, 2, device="cuda"))[0].is_cuda
torch.cuda.default_generators[0].manual_seed(5).initial_seed() == 5 == torch.cuda.initial_seed()
torch.empty_like(torch.ones(3), pin_memory=True).numel() == 3 and torch.zeros(3, pin_memory=True).sum() == 0
nn.Linear(2, 2, device="cuda").weight.is_cuda and nn.Linear(2, 2).cuda().weight.is_cuda and nn.Linear(2, 2).to(0).weight.is_cuda
nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.is_cuda
copy.deepcopy(nn.Linear(2, 2, device="cuda")).weight.is_cuda
nn.Linear(2, 2).to("cuda")(torch.ones(1, 2, device="cuda")).is_cuda
torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).is_cuda
torch.Generator(device="cuda").device.type == "cuda" and isinstance(torch.default_generator, torch.Generator)
torch.cuda.get_rng_state().numel() == 16 and len(torch.cuda.get_rng_state_all()) == 2
torch.cuda.manual_seed_all(3) is None and torch.cuda.initial_seed() == 3 and torch.cuda.manual_seed(4) is None
torch.cuda.get_device_name() and torch.cuda.get_device_properties(0).total_memory > 0
torch.cuda.get_device_capability() >= (8, 0) and torch.cuda.is_bf16_supported()
torch.cuda.max_memory_allocated() > 0 and torch.cuda.memory_reserved() > 0 and torch.cuda.memory_allocated(0) > 0
torch.cuda.memory_stats()["active_bytes.all.peak"] > 0 and torch.cuda.memory_stats()["num_alloc_retries"] == 0
torch.cuda.reset_peak_memory_stats() is None and torch.cuda.empty_cache() is None
torch.cuda.mem_get_info()[1] > 0 and torch.cuda.set_per_process_memory_fraction(0.9) is None
torch.cuda.nvtx.range_push("a") is not None and torch.cuda.cudart().cudaProfilerStart() == 0
torch.cuda.current_stream().wait_stream(torch.cuda.Stream()) is None and torch.cuda.synchronize() is None
torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
torch.accelerator.device_count() == 2 and torch.accelerator.set_device_index(0) is None
torch.accelerator.current_device_index() == 0 and torch.accelerator.synchronize() is None
torch.get_device_module("cuda") is torch.cuda and torch.get_device_module() is torch.cuda
torch.amp.GradScaler("cuda").is_enabled() and torch.cuda.amp.GradScaler().is_enabled()
torch.backends.cuda.matmul.allow_tf32 in (True, False) and torch.backends.cudnn.benchmark in (True, False)
not torch.is_autocast_enabled("cuda")
pickle.loads(pickle.dumps(torch.device("cuda:1"))) == torch.device("cuda", 1)
torch.distributed.is_nccl_available() and torch.cuda.nccl.version() > (2, 0)
torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True).is_high_priority_stream
not isinstance(torch.distributed.group.WORLD, torch.distributed.distributed_c10d.ProcessGroupNCCL)
str(torch.ones(1, device="cuda")).endswith("device='cuda:0')")
"""

BLOCKS: list[Callable[[], None]] = []


def block(function: Callable[[], None]) -> Callable[[], None]:
    BLOCKS.append(function)
    return function


@contextlib.contextmanager
def environment(**names: str) -> Iterator[None]:
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def raises(function: Callable[[], object], text: str) -> None:
    try:
        function()
    except (RuntimeError, TypeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError("nothing was raised")


@block
def mixed_precision() -> None:
    with torch.autocast(enabled=False, device_type="cuda"):
        assert not torch.is_autocast_enabled()
    model, scaler = nn.Linear(4, 4).cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(torch.ones(2, 4, device="cuda"))
        assert out.dtype == torch.float16 and torch.is_autocast_enabled()
    with torch.autocast(device_type="cuda", enabled=False):
        assert model(torch.ones(2, 4, device="cuda")).dtype == torch.float32
    with torch.autocast(device_type="cuda"):
        assert model(torch.ones(2, 4, device="cuda")).dtype == torch.float16
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert model(torch.ones(2, 4, device="cuda")).dtype == torch.bfloat16
    scaler.scale(out.float().sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_cuda
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.grad.is_cuda and optimizer.state[model.weight]["exp_avg"].is_cuda


@block
def default_device() -> None:
    torch.set_default_device("cuda")
    assert torch.ones(2).is_cuda and torch.tensor([1]).is_cuda and nn.Linear(2, 2).weight.is_cuda
    torch.set_default_device("cpu")
    with torch.device("cuda"):
        assert (
            torch.zeros(2).is_cuda
            and torch.tensor(1.0).is_cuda
            and torch.get_default_device().type == "cuda"
        )
    assert not torch.zeros(2).is_cuda
    torch.set_default_device(None)


@block
def generators_of_another_device() -> None:
    for where, generator in (("cuda", torch.Generator()), ("cpu", torch.Generator("cuda"))):
        try:
            torch.randperm(4, generator=generator, device=where)
        except RuntimeError as error:
            assert str(error).startswith(
                f"Expected a '{where}' device type for generator but found"
            )
        else:
            raise AssertionError("a GPU refuses this")


@block
def files() -> None:
    file = io.BytesIO()
    torch.save({"there": torch.ones(2, device="cuda"), "here": torch.ones(2)}, file)
    for where, expected in (
        *(
            (None, "cuda"),
            ("cpu", "cpu"),
            ({"cuda:0": "cpu"}, "cpu"),
            (lambda storage, place: storage, "cpu"),
        ),
        *((torch.device("cuda"), "cuda"), ("cuda:1", "cuda")),
    ):
        file.seek(0)
        assert torch.load(file, map_location=where)["there"].device.type == expected, where
    file.seek(0)
    assert not torch.load(file)["here"].is_cuda


@block
def streams() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    last.record()
    assert first.elapsed_time(last) >= 0
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
    torch.ones(1, device="cuda").record_stream(stream)


@block
def two_devices() -> None:
    scores = torch.ones(2, 3, device="cuda")
    raises(lambda: F.cross_entropy(scores, torch.zeros(2, dtype=torch.long)), "same device")
    raises(lambda: nn.Linear(3, 2, device="cuda")(torch.ones(3)), "same device")
    raises(lambda: nn.Embedding(4, 2, device="cuda")(torch.arange(2)), "same device")
    raises(lambda: torch.ones(3).add_(torch.ones(3, device="cuda")), "same device")
    raises(lambda: scores.numpy(), "numpy")
    raises(lambda: torch.cuda.set_device(5), "invalid device ordinal")


@block
def one_device() -> None:
    scores = torch.ones(2, 3, device="cuda")
    assert (scores[torch.tensor([0])] * torch.tensor(2.0)).is_cuda  # an index, and a number
    scores.copy_(torch.ones(2, 3))
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2)).cuda()
    F.mse_loss(
        model(torch.ones(2, 2, 4, device="cuda")).float(), torch.ones(2, 2).cuda()
    ).backward()
    assert all(param.grad.is_cuda for param in model.parameters())


@block
def devices_that_are_left() -> None:
    from verified_fsdp2.verifier.probe.substitutes.cuda_on_cpu.marks import Cuda

    lists = {"1": 1, "0,1": 2, "1, 0": 2, "0,7,1": 1, "": 0, "-1": 0, "0,0": 0, "0,1,2": 2}
    for chosen, left in lists.items():
        with environment(CUDA_VISIBLE_DEVICES=chosen):
            assert Cuda().count == left, chosen
            used = Cuda()
            used.begin()
        assert used.count == left  # what is set later has no effect
    assert Cuda(of_node=4).count == 4 and Cuda(of_node=1).count == 2


@block
def loaders() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for workers in (0, 1):
        for (batch,) in torch.utils.data.DataLoader(
            data, batch_size=4, pin_memory=True, num_workers=workers
        ):
            assert (
                batch.is_pinned()
                and not batch.is_cuda
                and batch.to("cuda", non_blocking=True).is_cuda
            )


@block
def random_numbers() -> None:
    torch.manual_seed(1)
    first, state = torch.randn(4, device="cuda"), torch.cuda.get_rng_state()
    second = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.randn(4, device="cuda"))
    torch.manual_seed(1)
    assert torch.equal(first, torch.randn(4, device="cuda")) and not torch.equal(first, second)
    here = torch.get_rng_state()
    F.dropout(torch.ones(3, device="cuda"))
    with torch.random.fork_rng(devices=[0]):
        torch.randn(3, device="cuda")
    assert torch.equal(here, torch.get_rng_state())


@block
def checkpointed() -> None:
    x = torch.ones(64, device="cuda", requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x) * 2, x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(out, x.grad)


@block
def compiled() -> None:
    model = torch.compile(nn.Linear(3, 3).cuda(), fullgraph=True)
    model(torch.ones(3, device="cuda")).sum().backward()
    assert "_orig_mod.weight" in model.state_dict()


@block
def attention() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.randn(1, 2, 128, 16, device="cuda", requires_grad=True) for _ in range(3))
    for backends in (
        [SDPBackend.FLASH_ATTENTION],
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    ):
        with sdpa_kernel(backends):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    mask = create_block_mask(lambda b, h, at, of: at >= of, None, None, 128, 128, device="cuda")
    assert flex_attention(q, k, v, block_mask=mask).is_cuda


@block
def profiled() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.ones(2, device="cuda").add(1)


@block
def own_functions() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            assert ctx.saved_tensors[0].is_cuda and grad.is_cuda
            return grad * 2

    x = torch.ones(3, device="cuda", requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.is_cuda


@block
def backends() -> None:
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    assert torch.distributed.get_backend() == "cpu:gloo,cuda:nccl"
    part, whole = torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")
    half = torch.distributed._make_nccl_premul_sum(0.5)
    torch.distributed.reduce_scatter_tensor(part, whole, op=half)
    torch.distributed.all_reduce(whole, half)
    assert part.tolist() == whole.tolist() == [0.5, 0.5]
    torch.distributed.destroy_process_group()


@block
def threads() -> None:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda") + 1))
    thread.start()
    thread.join()
    assert found[0].is_cuda


@block
def scripted() -> None:
    @torch.jit.script
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(2, device=x.device)

    assert shifted(torch.ones(2, device="cuda")).is_cuda


@block
def nested_tensors_are_differentiated() -> None:
    values = torch.ones(5, device="cuda", requires_grad=True)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5], device="cuda"))
    assert nested.is_cuda
    nested.cpu().values().sum().backward()
    assert values.grad is not None and values.grad.is_cuda


@block
def gradients_go_back_to_where_a_tensor_was() -> None:
    layer = nn.Linear(2, 2).cuda()
    layer(torch.ones(1, 2, device="cuda")).cpu().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.is_cuda


@block
def samples_on_two_devices_are_read() -> None:
    from verified_fsdp2.verifier.probe.tensor_fingerprint import row_hashes

    assert len(row_hashes([torch.ones(3, 2, device="cuda"), torch.ones(3, device="cpu")])) == 3


def table() -> list[tuple[str, str]]:
    """(call, check) of each row of tests/verifier/cuda_calls.md."""
    page = Path(__file__).with_suffix(".md")
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return [(cell[0].strip("`"), cell[4].strip("`")) for cell in cells]


def fails(call: Callable[[], object], words: str) -> bool:
    """Whether a call raises an error with these words."""
    try:
        call()
    except Exception as error:
        return words in str(error)
    return False


def problem(check: Callable[[], object]) -> str:
    """The error of a block, or of an expression that should be true."""
    try:
        return "is not true" if check() is False else ""
    except Exception as error:
        return repr(error)


def main() -> None:
    from verified_fsdp2.verifier.launch.request import Request
    from verified_fsdp2.verifier.probe.frames import Frames
    from verified_fsdp2.verifier.probe.install import install
    from verified_fsdp2.verifier.probe.session import Session
    from verified_fsdp2.verifier.trace.writer import Writer

    with tempfile.TemporaryDirectory() as folder:
        request, trace = (
            Request(folder, "t.py", folder, 2, cuda_on_cpu=True),
            Path(folder, "rank0.jsonl"),
        )
        install(Session(request, 0, Writer(trace), Frames(folder)))
        lines = [check for _, check in table()] + EXPRESSIONS.strip().splitlines()
        checks = {line: lambda line=line: bool(eval(line)) for line in lines}
        checks |= {one.__name__: one for one in BLOCKS}
        wrong = [f"{name}: {why}" for name, check in checks.items() if (why := problem(check))]
        wrong += [line for line in trace.read_text().splitlines() if '"probe_error"' in line]
    print(json.dumps(wrong))


if __name__ == "__main__":
    sys.exit(main())
