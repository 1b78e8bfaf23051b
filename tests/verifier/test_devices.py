"""The table of GPUs: each figure has its source, each name is found; a file of the user's own is
read as strictly as a spec.
"""

from pathlib import Path

import pytest

from verified_fsdp2.verifier import config
from verified_fsdp2.verifier.config.devices import (
    FORM,
    GIB,
    NOUN,
    TABLE,
    Device,
    device,
    named,
    table,
)
from verified_fsdp2.verifier.config.reading import files, validation
from verified_fsdp2.verifier.config.reading.problems import NotValid
from verified_fsdp2.verifier.errors import UserError

PLACE = Path(config.__file__).parent
FIGURES = ("memory", "flops", "attainable", "memory_bandwidth", "link", "network")
OWN = """\
title: NVIDIA GB200
memory: 184.0
flops: {bfloat16: 2500, float32: 80}
memory_bandwidth: 8000
link: {kind: NVLink, bandwidth: 900, gpus: 4}
network: 400
"""


def written() -> dict[str, dict[str, object]]:
    found = files.parsed((PLACE / TABLE).read_bytes(), PLACE / TABLE, NOUN)
    assert not found.problems
    data: dict[str, dict[str, object]] = found.data
    return data


@pytest.mark.parametrize("name", written())
def test_each_device_is_valid_and_each_figure_has_a_source(name: str) -> None:
    values = written()[name]
    assert not validation.faults(values, FORM)
    sources = values["sources"]
    known = tuple(figure for figure in FIGURES if figure != "attainable" or figure in values)
    assert isinstance(sources, dict) and tuple(sources) == known
    flops, attainable = values["flops"], values.get("attainable", {})
    assert isinstance(flops, dict) and isinstance(attainable, dict)
    assert all(rate < flops[dtype] for dtype, rate in attainable.items())
    assert sources["network"].startswith(("assumed: ", "https://"))


def test_rates_are_of_one_direction_and_in_bytes() -> None:
    found = device("h100")
    assert (found.link, found.network, found.per_node) == (450e9, 50e9, 8)
    assert (found.flops["bfloat16"], found.memory) == (989.4e12, int(79.1 * GIB))
    assert all(one.memory_bandwidth > one.link > one.network for one in table().values())


def test_names_are_found_in_any_spelling_and_belong_to_one_device() -> None:
    every = [name.lower() for one in table().values() for name in (one.name, *one.names)]
    assert sorted(every) == sorted(set(every))
    assert [
        named(name) and device(name).name
        for name in ("A100", "A100-80GB", "L40S", "V100", "h100-SXM")
    ] == [*("a100-40g", "a100-80g", "l40s", "v100-16g", "h100")]
    assert named("A1000") is None and named("") is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [("h10", "'h100'"), ("a100-80", "'a100-80g'"), ("gaudi2", "Known are a100-40g")],
)
def test_a_gpu_that_is_not_in_the_table(name: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        device(name)
    assert meant in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "gb200.yaml"
    path.write_text(OWN)
    found = device(str(path))
    assert isinstance(found, Device) and (found.name, found.per_node, found.link) == (
        "gb200",
        4,
        900e9,
    )
    assert found.flops == {
        "bfloat16": 2.5e15,
        "float16": 2.5e15,
        "float32": 80e12,
        "tfloat32": 80e12,
    }


@pytest.mark.parametrize(
    ("edit", "place", "message"),
    [
        (("memory: 184.0\n", ""), "1:1", "missing key 'memory'; for example 'memory: 79.1'"),
        (
            ("network: 400", "network: '400'"),
            "6:10",
            "network must be a number, found the text '400'; remove the quotes",
        ),
        (("bfloat16: 2500", "bf16: 2500"), "3:9", "unknown key 'bf16' in flops"),
        (("gpus: 4", "gpus: 0"), "5:44", "link.gpus must be at least 1, found 0"),
        (
            ("bandwidth: 900", "bandwidth: .inf"),
            "5:33",
            "link.bandwidth must be a finite number, found .inf",
        ),
        (("title: ", "titel: "), "1:1", "unknown key 'titel'; did you mean 'title'?"),
    ],
)
def test_a_file_that_is_wrong(
    tmp_path: Path, edit: tuple[str, str], place: str, message: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN.replace(*edit))
    with pytest.raises(NotValid) as caught:
        device(str(path))
    found = caught.value.problems[0]
    assert f"{found.place.line}:{found.place.column}" == place and message in found.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotValid, match="no such file"):
        device(str(tmp_path / "none.yaml"))


def test_another_cluster() -> None:
    found = device("h100").with_node(per_node=4, network=3200)
    assert (found.per_node, found.network, found.sources["network"]) == (4, 400e9, "given")
    assert device("h100").with_node() == device("h100")
