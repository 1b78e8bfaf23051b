"""Scripts that update their weights themselves: where a step ends, from which step they resume, and
what rounding alone decides.
"""

import queue
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from records import Recorder, cases, judge, micro, model, run, sources, step, stepped, trained
from verified_fsdp2.verifier.analysis.nonsmooth_steps import before_the_kink
from verified_fsdp2.verifier.analysis.steps_to_compare import own_steps
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge as judge_all
from verified_fsdp2.verifier.probe import rank
from verified_fsdp2.verifier.probe.dispatcher import Call, Dispatcher
from verified_fsdp2.verifier.probe.events.state import Watch
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import Step

SAVE = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "/c"}


def own(*micros: tuple[int, ...]) -> list[dict[str, Any]]:
    """Each update follows one backward on these samples."""
    made = [(micro(k, rows=rows), step(k, cls=""), stepped(k)) for k, rows in enumerate(micros, 1)]
    return [record for one in made for record in one]


@cases(
    "records, where",
    (own((1,), (1,), (1,), (2,), (2,), (2,)), "backwards"),  # an update is tried, on each batch
    (own((1,), (2,), (3,)), ""),
    (own((1,), (1,), (1,)), ""),  # one batch for all
    (own((1,), (1,), (2,), (3,), (4,)), ""),  # twice by chance
    (
        [*own((1,), (1,))[:3], SAVE, *own((1,), (1,))[3:], *own((2,), (2,))],
        "",
    ),  # a step is over where it is saved
    (
        [
            *own((1,), (1,), (2,), (2,))[:-1],
            stepped(4),
            step(9, cls="torch.optim.sgd.SGD"),
            stepped(9),
        ],
        "",
    ),
    ([], "forwards"),
)
def test_where_the_steps_of_a_script_end(records: list[dict[str, Any]], where: str) -> None:
    assert own_steps(run(*[[model(), *records]] * 2)) == where


def held(weight: float) -> dict[str, Any]:
    return {"weights": {"w": [weight, weight, 0.0, 0.0, 0.0]}}


def files(*resumed: float) -> Evidence:
    """Files that a script writes after step 2, in which an earlier step lies or not; the resume
    begins with these weights.
    """
    made = [
        record for k in range(1, 6) for record in (micro(k), step(k, **held(float(k))), stepped(k))
    ]
    write = {"kind": "checkpoint", "op": "write", "after_step": 2, "to": "/c/manifest.json"}
    read = {"kind": "checkpoint", "op": "read", "after_step": 0, "to": "/c/manifest.json"}
    train = run(*[[model(), *made[:6], write, *made[6:]]] * 2)
    again = [
        record
        for k, x in enumerate(resumed, 1)
        for record in (micro(k), step(k, **held(x)), stepped(k))
    ]
    return Evidence(train=train, resume=run(*[[read, model(), *again]] * 2, role="resume"))


@cases("weight, after", (3.0, 2), (2.0, 1), (1.0, 2), (9.0, None))
def test_own_files_may_hold_an_earlier_step(weight: float, after: int | None) -> None:
    """With the weights of the beginning nothing was restored: the files are still those of step
    2.
    """
    assert files(weight).resumed_after() == after


def test_own_files_from_which_the_script_does_not_resume() -> None:
    assert (
        judge("resume-is-exact", files(1.0)).status == "pass"
    )  # losses and weights after it are equal in these records
    assert judge("load-without-set", files(1.0)).status == "fail"
    assert judge("load-without-set", files(2.0)).status == "pass"
    assert judge("incomplete-checkpoint-chosen", files(2.0)).status == "not_applicable"


def jumping(gradient: float, loss: float = 0.0) -> Run:
    """One process whose gradient, or loss, at step 3 is another one."""
    single = trained(1, losses=(3.0, 2.0, 1.0 + loss, 0.5), role="single")
    for record in single.traces[0].of(Step):
        if record.step == 3:
            object.__setattr__(
                record,
                "grads",
                {n: [x * (1.0 + gradient) for x in g or []] for n, g in record.grads.items()},
            )
    return single


@cases(
    "gradient, loss, step", (5e-3, 0.0, 3), (0.0, 0.0, None), (0.5, 0.0, None), (5e-3, 1e-2, None)
)
def test_a_gradient_that_jumps_from_equal_weights_and_losses(
    gradient: float, loss: float, step: int | None
) -> None:
    train = trained(1, losses=(3.0, 2.0, 1.0, 0.5))
    noise = replace(train, role="perturbed")
    single = jumping(gradient, loss)
    evidence = Evidence(
        train=train, full_precision=train, reference=train, perturbed=noise, single=single
    )
    cut = before_the_kink(evidence)
    assert cut.kink == step
    assert cut.single is not None
    assert cut.single.steps() == (4 if step is None else step - 1)
    found = judge_all(evidence, ["matches-single-process"])[0]
    wrong = step is None and (gradient, loss) != (0.0, 0.0)
    assert found.status == ("fail" if wrong else "pass"), found.evidence
    assert ("kink" in found.evidence) is (step is not None)


def test_a_kink_is_none_where_ddp_differs_too() -> None:
    train = trained(1, losses=(3.0, 2.0, 1.0, 0.5))
    noise, single = replace(train, role="perturbed"), jumping(5e-3)
    evidence = Evidence(
        train=train, full_precision=train, reference=jumping(5e-3), perturbed=noise, single=single
    )
    assert before_the_kink(evidence).kink is None


def test_what_is_loaded_and_replaced() -> None:
    overwritten = {"kind": "overwritten", "names": ["w"], "of": 1}
    assert judge("loaded-weights-overwritten", [model(), overwritten, *own((1,))]).status == "fail"
    assert judge("loaded-weights-overwritten", [model(), *own((1,))]).status == "pass"
    survey = run([overwritten], role="survey")
    assert (
        judge("loaded-weights-overwritten", [model(), *own((1,))], survey=survey).status == "fail"
    )


def test_a_frozen_model_of_16_bits_that_cannot_follow() -> None:
    state = {"kind": "state", "values": {}, "gone": [], "evaluations": 0, "in_eval": []}
    seen = [{**state, "step": k, "frozen": {"model1.w": 0.9}} for k in (2, 3)]
    assert judge("average-in-low-precision", [model(), *own((1,), (2,)), *seen]).status == "fail"
    small = [{**state, "step": k, "frozen": {"model1.w": 0.1}} for k in (2, 3)]
    assert judge("average-in-low-precision", [model(), *own((1,), (2,)), *small]).status == "pass"


def test_a_run_up_to_a_step() -> None:
    whole = trained(2, losses=(3.0, 2.0, 1.0))
    assert whole.until(2).steps() == 2
    assert whole.until(2).completed
    assert whole.until(2).losses == whole.losses[:2]


@cases("value, kept", ("run.best.weights['w']", True), ("run.other.weights['w']", False))
def test_live_weights_in_an_object_that_keeps_the_best(value: str, kept: bool) -> None:
    text = """
class Run:
    def check(self, x):
        if x > self.best.x:
            self.best = Best(x, live())

    def end(self):
        use(self.best)
"""
    live = {
        value: {
            "holder": "object",
            "sketch": [1.0] * 5,
            "numel": 8,
            "live": True,
            "dtype": "float32",
        }
    }
    state = {"kind": "state", "values": {}, "gone": [], "evaluations": 0, "in_eval": []}
    records = [
        model(),
        {**state, "step": 1},
        *own((1,))[:3],
        {**state, "step": 2, "values": live},
        *own((1,), (2,))[3:],
    ]
    found = judge("snapshot-is-a-copy", records, **sources(text))
    assert (found.status == "fail") is kept, found.evidence


@cases("work", 0.0, 0.4)
def test_threads_of_a_stopped_script_end_their_work(work: float) -> None:
    """A writer that waits for more work, which never comes, is left; one that still works is waited
    for.
    """
    jobs: queue.Queue[float | None] = queue.Queue()
    done = []

    def write() -> None:
        while (seconds := jobs.get()) is not None:
            time.sleep(seconds)
            done.append(seconds)

    writer = threading.Thread(target=write)
    writer.start()
    jobs.put(work)
    started = time.monotonic()
    rank._let_threads_end()
    assert done == [work]
    assert writer.is_alive()
    assert time.monotonic() - started < rank.THREADS / 2
    jobs.put(None)
    writer.join()


def test_nothing_is_recorded_where_tensors_have_no_values() -> None:
    seen: list[Call] = []
    dispatcher = Dispatcher(lambda symbol, error: pytest.fail(f"{symbol}: {error}"))
    dispatcher.around("torch:sin", before=seen.append)
    dispatcher.install()
    try:
        torch.func.vmap(lambda x: torch.sin(x))(torch.ones(2))
        with FakeTensorMode():
            torch.sin(torch.ones(2))
        assert not seen
        torch.sin(torch.ones(2))
        assert len(seen) == 1
    finally:
        torch.sin = torch.sin.__wrapped__


@cases("between, found", (1.0, True), (0.5, False), (0.0, False))
def test_gradients_that_a_script_fades_between_steps_are_not_forgotten(
    between: float, found: bool
) -> None:
    """`between`: by which the script multiplies the gradient of a step before the next backward."""
    param, writer = torch.nn.Parameter(torch.ones(3)), Recorder()
    param.grad = torch.tensor([1.0, -2.0, 0.5])
    turn, slot = SimpleNamespace(begun=1), SimpleNamespace(name="w", param=param)
    optimizers = SimpleNamespace(of=lambda optimizer: turn)
    session: Any = SimpleNamespace(
        request=SimpleNamespace(steps=4),
        progress=SimpleNamespace(optimizers=optimizers),
        all_slots=lambda: [slot],
        write=writer.write,
        here=writer.here,
    )
    watch, optimizer = Watch(session), torch.optim.SGD([param])
    watch.stepped(optimizer)
    param.grad.mul_(between)
    watch._found(session.all_slots())
    param.grad += 1.0
    watch.stepped(optimizer)
    assert bool(writer.events) is found
