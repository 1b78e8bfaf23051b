"""What is saved and loaded through `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Hit
from ..events import Event, Trace, covers
from ..looks import is_const, is_known, made_by, names_in, shared, steps_of, text
from ..values import GLOBAL, Value, choices, reach
from .registry import detector

GETTERS = ("dsd.get_model_state_dict", "dsd.get_state_dict", "dsd.get_optimizer_state_dict")
SETTERS = ("dsd.set_model_state_dict", "dsd.set_state_dict", "dsd.set_optimizer_state_dict")
SAVES = ("dcp.save", "dcp.async_save")


def _options(event: Event) -> Event | None:
    return made_by(event.kwargs.get("options"), "dsd.StateDictOptions")


def _has(options: Event | None, name: str) -> bool:
    """Whether an option is surely on."""
    return options is not None and is_const(options.kwargs.get(name), True)


def _may_have(options: Event, name: str) -> bool:
    given = options.kwargs.get(name)
    return options.open or bool(options.args) or (given is not None and not is_const(given, False))


def _state(event: Event) -> Value | None:
    return event.arg(0, "state_dict")


@detector("full-state-dict-oom")
def full_state_dict_oom(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops(*GETTERS):
        options = _options(event)
        if options is not None and _has(options, "full_state_dict") and not _may_have(options, "cpu_offload"):
            told = f"{text(event.node)} gathers the whole model on every rank's device: cpu_offload is not set"
            yield trace.hit("full-state-dict-oom", told, event)


@detector("load-without-set")
def load_without_set(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops("dcp.load"):
        state = _state(event)
        if state is None or state.kind != "dict":
            continue
        for part in reach(state):
            got = made_by(part, "dsd.get_model_state_dict")
            options = _options(got) if got is not None else None
            copied = _has(options, "full_state_dict") or _has(options, "cpu_offload")
            if got is None or not copied or not trace.certain:
                continue
            later = trace.events[event.index + 1 :]
            if any(_sets_model(e, state) for e in later) or trace.escapes(state, event.index):
                continue
            told = f"dcp.load fills the copy that {text(got.node)} made, and nothing sets it into the model afterwards"
            yield trace.hit("load-without-set", told, event)
            break


def _sets_model(event: Event, state: Value) -> bool:
    sets = event.op in ("dsd.set_model_state_dict", "dsd.set_state_dict") or event.method in (
        "load_state_dict",
        "copy_",
    )
    if event.method == "load_state_dict" and event.on is not None and event.on.name.startswith("torch.optim"):
        return False
    return sets


@detector("optim-template-empty")
def optim_template_empty(trace: Trace) -> Iterator[Hit]:
    steps = steps_of(trace)
    for event in trace.ops("dcp.load"):
        state = _state(event)
        for part in reach(state) if state is not None else ():
            if part.kind != "made" or part.name != "state_dict" or part.event is None or part.event.on is None:
                continue
            made = [o for o, _ in trace.optimizers if o.result in choices(part.event.on)]
            plain = [o for o in made if o.op.startswith("torch.optim.") and not _stateless(o)]
            filled = any(e.index < event.index for e in steps) or any(
                e.index < event.index for e in trace.ops(*GETTERS[1:], *SETTERS[1:])
            )
            if plain and not filled:
                told = f"{text(part.event.node)} of an optimizer that has made no step is empty: dcp.load restores nothing of it"
                yield trace.hit("optim-template-empty", told, part.event)
                break


def _stateless(event: Event) -> bool:
    return event.op == "torch.optim.SGD" and "momentum" not in event.kwargs and not event.open


@detector("lenient-load-hides-mismatch")
def lenient_load(trace: Trace) -> Iterator[Hit]:
    if trace.methods("requires_grad_") or names_in(trace, "peft", "lora", "LoRA", "adapter", ".requires_grad ="):
        return
    for event in trace.ops("dcp.load"):
        planner = made_by(event.kwargs.get("planner"), "dcp.DefaultLoadPlanner")
        if planner is not None and is_const(planner.kwargs.get("allow_partial_load"), True):
            told = "allow_partial_load: what the checkpoint does not hold keeps its random values, without a word"
            yield trace.hit("lenient-load-hides-mismatch", told, planner)
    for event in trace.ops(*SETTERS[:2]):
        options = _options(event)
        given = options.kwargs.get("strict") if options is not None else None
        if given is not None and is_const(given, False) and event.discarded:
            told = f"{text(event.node)} is not strict, and nobody looks at the keys that it returns"
            yield trace.hit("lenient-load-hides-mismatch", told, event)


@detector("local-shard-export")
def local_shard_export(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops("torch.save"):
        path = event.arg(1, "f")
        if not event.args or trace.partial or shared(event.args[0]):
            continue
        everywhere = trace.whole and path is not None and not any(p.rank or p.kind == "free" for p in reach(path))
        if not event.on_some_ranks and (not everywhere or any(g.test.rank for g in event.guards)):
            continue
        for part in reach(event.args[0]):
            made = _shards(trace, part)
            if made is not None:
                who = (
                    "one rank writes that rank's shards only"
                    if event.on_some_ranks
                    else "every rank writes its shards into one file"
                )
                yield trace.hit(
                    "local-shard-export", f"{text(event.node)}: {who} ({text(made.node)} holds DTensors)", event
                )
                break


def _shards(trace: Trace, part: Value) -> Event | None:
    """The call that made a state dict of shards."""
    event: Event | None = part.event if part.kind == "made" else None
    if event is None:
        return None
    if part.name in ("dsd.get_model_state_dict", "dsd.get_state_dict"):
        plain = "options" not in event.kwargs and not event.open and bool(event.args)
        return event if plain and trace.managed_by(event.args[0], event) is not None else None
    if part.name == "state_dict" and event.on is not None and trace.managed_by(event.on, event) is not None:
        return event
    return None


_RANDOM = (
    "torch.get_rng_state",
    "torch.random.get_rng_state",
    "torch.cuda.get_rng_state",
    "random.getstate",
    "numpy.random.get_state",
)


@detector("per-rank-state-deduplicated")
def per_rank_state(trace: Trace) -> Iterator[Hit]:
    seeded = [
        e for e in trace.ops("torch.manual_seed", "torch.cuda.manual_seed", "random.seed") if e.args and e.args[0].rank
    ]
    if not seeded:
        return
    for event in trace.ops(*SAVES):
        state = _state(event)
        if state is None or state.kind != "dict":
            continue
        for key, item in state.attrs.items():
            if key.startswith("[") and item.kind == "made" and item.name in _RANDOM:
                told = f"every rank saves its own random state under the one key {key[1:-1]!r}; the checkpoint keeps one of them"
                yield trace.hit("per-rank-state-deduplicated", told, item.event)


_VARIES = (
    "time.time",
    "time.time_ns",
    "uuid.uuid4",
    "uuid.uuid1",
    "datetime.datetime.now",
    "tempfile.mkdtemp",
    "os.getpid",
)


@detector("rank-dependent-checkpoint-path")
def rank_dependent_path(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops(*SAVES):
        if event.on_some_ranks or "no_dist" in event.kwargs:
            continue
        writer = event.kwargs.get("storage_writer")
        made = made_by(writer, "dcp.FileSystemWriter") if writer is not None else None
        path = made.arg(0, "path") if made is not None else event.kwargs.get("checkpoint_id")
        if path is None or ("process_group" in event.kwargs and path.rank != GLOBAL):
            continue
        varies = next((p for p in reach(path) if p.kind == "made" and p.name in _VARIES), None)
        if (path.rank == GLOBAL or varies is not None) and not shared(path):
            what = (
                "holds the rank"
                if path.rank == GLOBAL
                else f"holds {text(varies.node)}"
                if varies and varies.node
                else "varies"
            )
            told = f"the path of the checkpoint {what}: every rank writes into a folder of its own"
            yield trace.hit("rank-dependent-checkpoint-path", told, event)


@detector("async-save-process-group")
def async_save_group(trace: Trace) -> Iterator[Hit]:
    groups = trace.ops("dist.init_process_group")
    backends = {one.const for e in groups for one in choices(e.arg(0, "backend") or Value("unknown"))}
    if not groups or not backends <= {"gloo", "nccl"}:
        return
    for event in trace.ops("dcp.async_save"):
        given = event.kwargs.get("process_group")
        alone = given is None or is_const(given, None)
        awaited = any(e.on is event.result and e.index == event.index + 1 for e in trace.methods("result"))
        if alone and not event.open and not awaited and "async_checkpointer_type" not in event.kwargs:
            told = "the background save and the training use one process group, in no fixed order"
            yield trace.hit("async-save-process-group", told, event)


@detector("incomplete-checkpoint-chosen")
def result_discarded(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops("dcp.async_save"):
        if event.discarded:
            told = "the result of async_save is thrown away: nobody knows whether the checkpoint was finished"
            yield trace.hit("incomplete-checkpoint-chosen", told, event)


@detector("full-sd-into-dtensor")
def full_into_dtensor(trace: Trace) -> Iterator[Hit]:
    for event in trace.methods("load_state_dict"):
        model, state = event.on, event.arg(0, "state_dict")
        if model is None or state is None or trace.sharded_by(model, event) is None or _saved_sharded(trace):
            continue
        if event.open or "assign" in event.kwargs:
            continue
        read = [p for p in reach(state) if p.kind == "made" and p.name in ("torch.load", "safetensors.torch.load_file")]
        read += [p for p in reach(state) if _of_plain_model(trace, p)]
        split = any(p.name in ("tensor.distribute_tensor", "dsd.get_model_state_dict") for p in reach(state))
        if read and not any(p.rank for p in reach(state)) and not split:
            told = f"{text(event.node)} puts whole tensors into parameters that are shards"
            yield trace.hit("full-sd-into-dtensor", told, event)


def _of_plain_model(trace: Trace, part: Value) -> bool:
    """Whether a value is the state dict of a known model that nobody shards."""
    model = part.event.on if part.kind == "made" and part.name == "state_dict" and part.event is not None else None
    return model is not None and is_known(trace, model) and id(model) not in trace.roots


def _saved_sharded(trace: Trace) -> bool:
    """Whether the project itself saves state dicts that were not gathered."""
    for event in trace.ops("torch.save"):
        raw = [p for a in event.args[:1] for p in reach(a) if p.kind == "made" and p.name == "state_dict"]
        if raw and not shared(event.args[0]):
            return True
    return False


@detector("wrapper-prefix-keys")
def wrapper_prefix_keys(trace: Trace) -> Iterator[Hit]:
    """Saved through the compiled model, loaded into the plain one, or the other way round."""
    compiled = {id(e.result): e for e in trace.ops("torch.compile") if e.args}
    loads = [e.on for e in trace.methods("load_state_dict") if e.on is not None]
    for event in trace.ops("torch.save", *SAVES):
        for part in reach(event.args[0]) if event.args else ():
            made = part.event if part.kind == "made" and part.name == "state_dict" else None
            wrapped = compiled.get(id(made.on)) if made is not None else None
            if made is None or wrapped is None or names_in(trace, "_orig_mod"):
                continue
            plain = any(model is wrapped.args[0] for model in loads) and not any(
                id(model) in compiled for model in loads
            )
            if plain:
                told = f"{text(made.node)} of a compiled model has keys with the prefix `_orig_mod.`; it is loaded into the plain one"
                yield trace.hit("wrapper-prefix-keys", told, made)
                break


@detector("scheduler-or-progress-not-restored")
def scheduler_not_restored(trace: Trace) -> Iterator[Hit]:
    """A schedule that is saved by nobody, in a script that saves and loads its optimizer."""
    if not trace.certain or names_in(trace, "last_epoch", "last_step"):
        return
    saves, loads = trace.ops(*SAVES, "torch.save"), trace.ops("dcp.load", "torch.load")
    whole = any(_speaks_of_optimizer(trace, part) for e in saves for part in reach(e.args[0]) if e.args)
    if not saves or not loads or not whole:
        return
    for made in trace.matching(lambda name: name.startswith("torch.optim.lr_scheduler.")):
        steps = [e for e in trace.methods("step") if e.on is made.result]
        kept = [e for e in trace.methods("state_dict", "load_state_dict") if e.on is made.result]
        forward = any(e.caught or not e.loops for e in steps)
        held = any(made.result in e.args for e in trace.events if e.op not in ("", made.op))
        once = len({id(e.node) for e in steps}) == 1 and len(steps) == 1
        if once and not kept and not forward and not held and not trace.escapes(made.result):
            told = f"{text(made.node)}: the script saves and loads its optimizer, and never this schedule"
            yield trace.hit("scheduler-or-progress-not-restored", told, made)


def _speaks_of_optimizer(trace: Trace, part: Value) -> bool:
    if part.kind != "made" or part.event is None:
        return False
    own = part.name == "state_dict" and any(part.event.on is o.result for o, _ in trace.optimizers)
    return own or part.name in GETTERS[1:]


@detector("step0-save-advances-adam")
def saved_before_first_step(trace: Trace) -> Iterator[Hit]:
    """The optimizer's state is saved before the first step, in any case."""
    steps = steps_of(trace)
    for event in trace.ops(*GETTERS[1:]):
        adam = [o for o, _ in trace.optimizers if o.result in event.args and o.op.startswith("torch.optim.Ada")]
        loaded = any(covers(e, event) for e in trace.ops("dcp.load", "torch.load", *SETTERS))
        if not adam or not steps or event.index > steps[0].index or event.on_some_ranks or event.loops or loaded:
            continue
        saved = [e for e in trace.ops(*SAVES, "torch.save") if e.args and event.result in reach(e.args[0])]
        if any(covers(event, e) and e.index < steps[0].index for e in saved):
            told = f"{text(event.node)} before the first step makes the optimizer count one"
            yield trace.hit("step0-save-advances-adam", told, event)
