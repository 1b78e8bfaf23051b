"""Laws of the guard on posts of many ranks, without a launch."""

import json
import math
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from verified_fsdp2.verifier.guard.context import Context
from verified_fsdp2.verifier.guard.epoch import Epoch
from verified_fsdp2.verifier.guard.exchange import Exchange
from verified_fsdp2.verifier.guard.journal import Breach, Journal
from verified_fsdp2.verifier.guard.laws.gradients import Gradients
from verified_fsdp2.verifier.guard.laws.losses import LOGGED, Losses, _divisor
from verified_fsdp2.verifier.guard.laws.replicas import Replicas
from verified_fsdp2.verifier.guard.laws.resume import Resume, other_generators
from verified_fsdp2.verifier.guard.laws.samples import Samples
from verified_fsdp2.verifier.guard.laws.training import Training
from verified_fsdp2.verifier.guard.measured import Measured
from verified_fsdp2.verifier.guard.records import Record, Records
from verified_fsdp2.verifier.guard.settings import Settings
from verified_fsdp2.verifier.probe.compat.groups import patience

STORE = dist.HashStore()


def exchange(rank: int, world: int, store: Any = None) -> Exchange:
    """Of a rank of a world that is simulated: all ranks have one store in this process."""
    found = Exchange()
    found.rank, found.world = rank, world
    found._store = dist.PrefixStore("test", STORE if store is None else store)
    return found


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    found = Context(Settings(out=str(tmp_path / "guard.jsonl")))
    found.exchange = exchange(0, 8)
    found.began = 1.0
    yield found


def check(step: int, **values: Any) -> Measured:
    measured = Measured("check", step)
    measured.values.update(values)
    return measured


def test_a_simulated_world_of_256_ranks() -> None:
    """What a rank leaves does not grow with ranks or parameters, and rank 0 reads all of it."""
    world, store = 256, dist.HashStore()
    ranks = [exchange(rank, world, store) for rank in range(world)]
    sizes = []
    for rank in ranks:
        rank.leave("check", 100, {"replicas-agree": {"sets": {"mesh1": [7, {"weights": 2**63}]}}})
        sizes.append(rank.sent)
    posts = ranks[0].collect("check", 100, hurry=lambda: False)
    assert sorted(posts) == list(range(world))
    assert max(sizes) < 200
    assert ranks[0].calls <= 8 and ranks[5].calls == 1


def test_a_rank_that_is_late_is_left_out() -> None:
    store = dist.HashStore()
    for rank in (0, 1, 3):
        exchange(rank, 4, store).leave("check", 7, {"of": rank})
    posts = exchange(0, 4, store).collect("check", 7, hurry=lambda: False, seconds=0.1)
    assert posts == {0: {"of": 0}, 1: {"of": 1}, 3: {"of": 3}}


def test_a_rank_takes_away_what_it_has_left() -> None:
    store = dist.HashStore()
    one = exchange(0, 1024, store)
    for step in range(50):
        one.leave("check", step, {})
    assert store.num_keys() < 10


def sets(values: dict[int, tuple[int, int]]) -> dict[int, dict[str, Any]]:
    """Posts of ranks: {rank: (identity, sketch of the weights)}."""
    return {r: {"sets": {"mesh": [i, {"weights": v}]}} for r, (i, v) in values.items()}


def test_the_odd_rank_of_three_replicas_is_named(context: Context) -> None:
    law = Replicas(context)
    whole = {rank: {"mesh": {"weights/a": 1, "weights/b": 2 + (rank == 4)}} for rank in (0, 2, 4)}
    law._ask_details = lambda measured_step: whole  # type: ignore[method-assign]
    even = sets({0: (1, 10), 2: (1, 10), 4: (1, 10), 1: (2, 30)})
    assert list(law.judge(check(20), even)) == []
    odd = sets({0: (1, 10), 2: (1, 10), 4: (1, 11), 1: (2, 30)})
    (found,) = law.judge(check(40), odd)
    assert (found.ranks, found.names, found.since) == ([4], ["b"], 20)
    assert "rank 4 holds other bits of b" in found.message


def test_ranks_that_never_agreed_are_not_compared(context: Context) -> None:
    law = Replicas(context)
    words: dict[str, str] = {}
    context.ask = words.__setitem__  # type: ignore[method-assign]
    begin = {r: {"whole": {"weights/w": [1, 5], "weights/expert": [2, r]}} for r in range(4)}
    assert list(law.judge(Measured("begin", 0), begin)) == []
    first = {
        r: {
            "whole": {
                "weights/w": [1, 6],
                "weights/expert": [2, 10 + r],
                "buffers/running": [3, r],
                "optimizer/w.exp_avg": [1, 9],
            }
        }
        for r in range(4)
    }
    assert list(law.judge(check(1), first)) == []
    assert words["differ"].split("\n") == ["buffers/running", "weights/expert"]


def test_weights_that_one_step_moves_apart(context: Context) -> None:
    law = Replicas(context)
    begin = {r: {"whole": {"weights/w": [1, 5]}} for r in range(4)}
    list(law.judge(Measured("begin", 0), begin))
    (found,) = law.judge(check(1), {r: {"whole": {"weights/w": [1, r == 2]}} for r in range(4)})
    assert found.ranks == [2] and found.since == 0


def test_settings_of_ranks(context: Context) -> None:
    law = Replicas(context)
    name = "optimizer0.groups[0].lr"
    posts = {r: {"settings": {name: 0.1 if r != 5 else 0.05}, "scale": {}} for r in range(8)}
    (found,) = law.judge(check(30), posts)
    assert found.ranks == [5] and found.names == [name]


def window(names: list[str], **sets: set[str]) -> dict[str, str]:
    kinds = {"trainable": {*names}, "held": {*names}, "gradient": {*names}, "moved": {*names}}
    bits = {**kinds, **sets}
    return {
        kind: hex(sum(1 << at for at, name in enumerate(names) if name in those))
        for kind, those in bits.items()
    }


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ({"moved": {"a"}, "held": {"a"}}, "b has a gradient and is in no optimizer"),
        ({"moved": {"a"}}, "b has a gradient and is in an optimizer, and no step has changed it"),
        ({"moved": {"a"}, "gradient": {"a"}}, "b has no gradient any more"),
        ({"moved": {"a"}, "gradient": {"a"}, "trainable": {"a"}}, ""),  # frozen by the script
        ({}, ""),
    ],
)
def test_what_does_not_train(context: Context, last: dict[str, set[str]], says: str) -> None:
    law, names = Training(context), ["a", "b"]
    found: list[Breach] = []
    for step in range(10, 90, 10):
        now = window(names, **(last if step > 40 else {}))
        # A shard of one rank may be still while others move.
        still = window(
            names,
            moved=set(),
            gradient=set(),
            **({k: v for k, v in last.items() if k in ("held", "trainable")} if step > 40 else {}),
        )
        measured = check(step, training={"names": names})
        found += law.judge(measured, {0: now, 1: still})
    assert [one.message for one in found] == ([says] if says else [])


def test_weights_that_no_step_can_have_made(context: Context) -> None:
    law = Training(context)
    for step, value in ((10, 1.0), (20, 1.05), (30, 1e30), (40, math.nan)):
        measured = check(step, training={"reach": [0.1, 0.0]})
        measured.numbers["largest"] = {"w": value}
        found = [one.message.split(";")[0] for one in law.local(measured)]
        if step == 30:
            assert found == ["the largest element of w is 1e+30 and was 1.05 at the last check"]
        elif step == 40:
            assert found == ["w holds values that are not finite"]
        else:
            assert found == []


def batches(rows: dict[int, dict[int, list[int]]], epoch: int = 1) -> dict[int, dict[str, Any]]:
    """Posts of the samples: {rank: {step: rows}}."""
    return {
        rank: {
            "steps": [[s, epoch, sum(own), len(own), own] for s, own in steps.items()],
            "share": 0,
            "size": 1000,
            "repeats": False,
            "shuffles": True,
            "data": [0, 1],
        }
        for rank, steps in rows.items()
    }


def test_samples_on_two_ranks(context: Context) -> None:
    context.exchange = exchange(0, 2)
    law = Samples(context)
    even = {0: {1: [1, 2, 3, 4]}, 1: {1: [5, 6, 7, 8]}}
    assert list(law.judge(check(1), batches(even))) == []
    same = {0: {2: [11, 12, 13, 14]}, 1: {2: [11, 12, 13, 14]}}
    (found,) = law.judge(check(2), batches(same))
    assert "ranks 0, 1 train on the same samples in one step, from step 2 on" in found.message


def test_samples_twice_in_an_epoch(context: Context) -> None:
    context.exchange = exchange(0, 2)
    law = Samples(context)
    steps = [
        {0: {s: [8 * s + i for i in range(4)]}, 1: {s: [8 * s + 4 + i for i in range(4)]}}
        for s in range(1, 20)
    ]
    for number, step in enumerate(steps):
        assert list(law.judge(check(number + 1), batches(step))) == []
    again = {rank: {25: own[9]} for rank, own in steps[8].items()}
    (found,) = law.judge(check(25), batches(again))
    assert "8 of 8 rows were trained on before in this epoch" in found.message
    assert (
        list(law.judge(check(26), batches({r: {26: own[25]} for r, own in again.items()}, 2))) == []
    )


@pytest.mark.parametrize("replaced", [True, False])
def test_samples_that_are_drawn_with_replacement(context: Context, replaced: bool) -> None:
    """Without it each rank has an order of its own of all of them: a fault."""
    context.exchange = exchange(0, 2)
    law, draw, found = Samples(context), random.Random(0), []
    orders = [draw.sample(range(1000), 1000) for _ in range(2)]
    for step in range(1, 9):
        rows = {
            rank: {step: draw.choices(range(1000), k=40) if replaced else own[40 * step :][:40]}
            for rank, own in enumerate(orders)
        }
        found += [one for one in law.judge(check(step), batches(rows)) if one.step > 3]
    assert bool(found) != replaced


def test_the_same_order_in_each_epoch(context: Context) -> None:
    context.exchange = exchange(0, 1)
    law, found = Samples(context), []
    for epoch in range(1, 4):
        for step in range(6):
            rows = {0: {6 * epoch + step: [step * 4 + i for i in range(4)]}}
            found += law.judge(check(6 * epoch + step), batches(rows, epoch))
    assert {one.key for one in found} == {"order"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("step 50 loss 0.92158 norm 1.9", "0.92158"),
        ("{'loss': 2.5, 'grad_norm': 1.0}", "2.5"),
        ("train/loss=1.25e-01", "1.25e-01"),
        ("epoch 3 | train_loss: 0.3", "0.3"),
        ("val_loss 0.5", None),
        ("closs 0.5", None),
        ("loss after 100 steps", None),
    ],
)
def test_what_is_read_as_a_logged_loss(text: str, value: str | None) -> None:
    found = LOGGED.search(text)
    assert (found["value"] if found is not None else None) == value


@pytest.mark.parametrize(
    ("logged", "says"),
    [(2.0, ""), (1.8, ""), (16.0, "8 times the mean"), (0.25, "1/8 of the mean"), (5.0, "")],
)
def test_a_logged_loss_is_the_mean(context: Context, logged: float, says: str) -> None:
    law, found = Losses(context), []
    for step in range(1, 9):
        posts = {rank: {"steps": [[step, 1, 1.0, 1.6 + 0.1 * rank + 0.05]]} for rank in range(8)}
        mean = sum(post["steps"][0][3] for post in posts.values()) / 8
        values = {"logged": [(step, logged * mean / 2)], "divide": None}
        found += law.judge(check(step, losses=values), posts)
    assert [says in one.message for one in found] == ([True] if says else [])


def test_a_loss_is_logged_after_the_check_of_its_step(context: Context) -> None:
    law, found = Losses(context), []
    for step in (50, 100, 150):
        values = {"steps": [], "logged": [(step - 50, 8 * 1.4375)], "divide": None}
        measured = check(step, losses=values)
        found += law.judge(measured, posts_of_losses(step))
        assert measured.values["curves"] == {"loss": 1.4375}
    (one,) = found
    assert "8 times the mean" in one.message and one.step == 100


def posts_of_losses(step: int) -> dict[int, dict[str, Any]]:
    return {rank: {"steps": [[step, 1, 1.0, 1.0 + rank / 8]]} for rank in range(8)}


def test_a_logged_loss_that_becomes_that_of_one_rank(context: Context) -> None:
    law, found = Losses(context), []
    for step in range(10, 110, 10):
        value = 1.4375 if step < 60 else 1.0
        values = {"steps": [], "logged": [(step, value)], "divide": None}
        found += law.judge(check(step, losses=values), posts_of_losses(step))
    (one,) = found
    assert one.step == 70 and "is that of rank 0 now" in one.message


def gradients(step: int, logged: float | None = None) -> Measured:
    return check(step, **{"logged norm": {} if logged is None else {step: logged}, "curves": {}})


def test_ranks_scale_gradients_alike(context: Context) -> None:
    law, found = Gradients(context), []
    for step, last in ((10, 0.5), (20, 0.5), (30, 0.4), (40, 0.4)):
        posts = {
            r: {"factors": {"w": last if r == 3 else 0.5, f"of {r}": r}, "squares": 1.0}
            for r in range(4)
        }
        found += law.judge(gradients(step), posts)
    (one,) = found
    assert one.step == 40 and "0.4 on rank 3, 0.5 on rank" in one.message


@pytest.mark.parametrize("after", [False, True])  # logged after the step that is checked
@pytest.mark.parametrize(("logged", "found"), [(2.0, 0), (1.0, 1), (1.5, 0)])
def test_a_logged_norm_is_that_of_all_ranks(
    context: Context, logged: float, found: int, after: bool
) -> None:
    law, breaches = Gradients(context), []
    posts = {rank: {"factors": {}, "squares": 1.0} for rank in range(4)}
    for step in (10, 20, 30):
        measured = check(step, curves={})
        measured.values["logged norm"] = {step - 10 if after else step - 1: logged}
        breaches += law.judge(measured, posts)
    assert [one.step for one in breaches] == [30 if after else 20][:found]


def test_gradients_of_the_last_step(context: Context) -> None:
    law, found = Gradients(context), []
    for step, value in ((10, 0.0), (20, 0.1), (30, 0.1)):
        measured = check(step)
        measured.numbers["stale"] = {"w": value}
        found += law.local(measured)
    assert [one.step for one in found] == [30]


@pytest.mark.parametrize(
    ("windows", "says"),
    [
        ([[4.0] * 4] * 5 + [[4.0] * 2], "2 micro-batches are divided by 4"),
        ([[4.0] * 4] * 5 + [[1.0] * 4], "4 micro-batches are divided by 1,"),
        ([[4.0] * 4] * 5 + [[4.0, 4.0, 4.0, 1.0]], "4 micro-batches are divided by 4, 1,"),
        ([[4.0] * 4] * 5 + [[2.0] * 2], ""),
        ([[4.0] * 4] * 5 + [[8.0] * 8], ""),  # more accumulation later
        ([[1.0]] * 5 + [[0.5]], ""),  # a weight of the loss
        ([[4.0] * 2] * 5, ""),
    ],
)
def test_micro_batches_weigh_alike(context: Context, windows: list[list[float]], says: str) -> None:
    law, found = Losses(context), []
    for step, divisors in enumerate(windows):
        law._weigh(step, divisors)
    found += law.local(check(len(windows)))
    assert [says in one.message for one in found] == ([True] if says else [])


def test_by_what_a_loss_is_divided() -> None:
    loss = torch.ones((), requires_grad=True).exp()
    assert [_divisor(one) for one in (loss / 4, loss * 0.25, loss, loss + 1)] == [4, 4, 1, 1]
    with FlopCounterMode(display=False):
        assert [_divisor(one) for one in (loss / 4, loss * 0.25, loss / 2.0)] == [4, 4, 2]


def test_a_rate_that_is_written_over(context: Context) -> None:
    law = Training(context)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    context.scene.schedules(schedule)
    found: list[Breach] = []
    for step in range(6):
        law._overwritten()
        found += law._schedule(check(step))
        optimizer.step()
        schedule.step()
        if step > 2:
            optimizer.param_groups[0]["lr"] = 0.1
    (one,) = found
    assert "the optimizer steps with 0.1" in one.message


def test_a_record_is_found_again(tmp_path: Path) -> None:
    records, saved = Records(str(tmp_path / "guard.jsonl")), tmp_path / "tmp"
    saved.mkdir()
    inode = [saved.stat().st_dev, saved.stat().st_ino]
    record = Record(path=str(saved), step=30, world=8, inode=inode)
    records.write(record)
    renamed = saved.rename(tmp_path / "step_30")
    assert records.of(str(renamed)) == record
    (file,) = records.folder.glob("*.json")
    file.write_text(file.read_text().replace("30", "31", 1))
    with pytest.raises(ValueError, match="was changed after it was written"):
        records.of(str(renamed))


def against(context: Context, record: Record, **own: Any) -> list[str]:
    law = Resume(context)
    law.record, context.base = record, record.step
    post = {"state": {}, "settings": record.settings, "trainable": record.trainable} | own
    found = law.judge(Measured("begin", record.step), {r: post if not r else {} for r in range(8)})
    return [one.message.partition("): ")[2] for one in found]


def test_what_came_back(context: Context) -> None:
    record = Record(
        path="/runs/step_30",
        step=30,
        world=4,
        sketches={"weights": {"a": "5", "b": "ff"}, "optimizer": {"a.exp_avg": "7"}},
        settings={"o.lr": 0.1, "o.betas": [0.9, 0.99]},
        trainable=["a", "b"],
    )
    same = {"weights": {"a": 5, "b": 255}, "optimizer": {"a.exp_avg": 7}}
    assert against(context, record, state=same) == []
    other = {"weights": {"a": 5, "b": 254}}
    assert against(context, record, state=other) == [
        "weights: b came back with other values",
        "optimizer: a.exp_avg did not come back",
    ]
    assert against(context, record, state=same, trainable=["a"]) == [
        "b trained before, and do not now"
    ]
    # A schedule may step between a save and the next step; betas may not change.
    found = against(context, record, state=same, settings={"o.lr": 0.2, "o.betas": (0.9, 0.5)})
    assert found == ["o.betas is (0.9, 0.5) and was [0.9, 0.99]"]
    record.settings["schedule0.last_epoch"] = 30
    back = {"o.lr": 0.2, "o.betas": (0.9, 0.99), "schedule0.last_epoch": 0}
    found = against(context, record, state=same, settings=back)
    assert found == ["schedule0.last_epoch is 0 and was 30"]
    record.next_settings = {"o.lr": 0.09, "o.betas": [0.9, 0.99]}
    found = against(context, record, state=same, settings={"o.lr": 0.2, "o.betas": (0.9, 0.99)})
    assert found == ["o.lr is 0.2 and was 0.09"]


@pytest.mark.parametrize(
    ("now", "draws", "other"),
    [
        (("s0", "s1"), True, []),
        (("x0", "x1"), True, []),  # a loader has drawn since
        (("s0", "s0"), True, [1]),  # one state for all
        (("f0", "f1"), True, [0, 1]),  # as when training began
        (("f0", "f1"), False, []),
    ],
)
def test_generators_come_back(now: tuple[str, str], draws: bool, other: list[int]) -> None:
    drawn = {"0": ["f0", "s0"], "1": ["f1", "s1"]}
    record = Record(path="/runs/step_30", step=30, world=2, drawn=drawn)
    posts = {rank: {"random": state, "draws": draws} for rank, state in enumerate(now)}
    assert other_generators(record, posts) == other


def test_the_samples_after_a_save_are_those_of_its_process(tmp_path: Path) -> None:
    record = Record(path="/runs/step_2", step=2, world=1, epoch_rows=8, seen=[1, 2])
    lines: list[dict[str, Any]] = [
        {"kind": "start"},
        {"kind": "save", "path": "/runs/step_2", "step": 2},
        {"kind": "check", "samples": [[1, 4, "aa"], [3, 4, "bb"]]},
        {"kind": "start"},  # of another run with the same journal
        {"kind": "check", "samples": [[4, 4, "cc"]]},
    ]
    journal = tmp_path / "guard.jsonl"
    journal.write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "che')
    epoch = Epoch()
    epoch.go_on(record, journal)
    assert epoch.earlier == {3: (0xBB, 4)}
    assert epoch.seen == {1, 2} and epoch.rows == 8


def test_when_a_collective_gives_up() -> None:
    assert patience() == math.inf
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert patience() == 60
    finally:
        dist.destroy_process_group()


def test_a_breach_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(str(tmp_path / "guard.jsonl"), 3)
    for step in (10, 20):
        journal.breach(Breach("samples", step, f"twice at {step}", key="twice"))
    lines = [json.loads(line) for line in (tmp_path / "guard.rank3.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["step"]) for one in lines] == [("breach", 10)]
    assert capsys.readouterr().err == "fsdp2 guard: step 10: samples: twice at 10\n"


def test_a_hook_gets_the_breach(tmp_path: Path) -> None:
    import time

    got = tmp_path / "got.json"
    journal = Journal(str(tmp_path / "guard.jsonl"), 0, hook=f"cat > '{got}'")
    journal.breach(Breach("samples", 10, "twice"))
    for _ in range(100):
        if got.exists() and got.read_text():
            break
        time.sleep(0.05)
    assert json.loads(got.read_text())["law"] == "samples"


def test_scalars_are_read_at_once() -> None:
    measured = Measured("check", 1)
    measured.take("bits", "a", torch.tensor(-1, dtype=torch.int64))
    measured.take("largest", "a", torch.tensor(2.5))
    measured.send()
    measured.wait()
    assert measured.numbers == {"bits": {"a": 2**64 - 1}, "largest": {"a": 2.5}}
