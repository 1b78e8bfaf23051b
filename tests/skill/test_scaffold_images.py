"""Images in generated projects: read, cut and numbered as they should be, and damaged ones
named.
"""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from data_project import IMPORTED, Project
from scripts import python
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.pipeline import verify

ROOT = Path(__file__).resolve().parents[2]


def image(project: Project, name: str, pixels: np.ndarray) -> None:
    path = project.folder / "images" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def image_data(project: Project, **more: object) -> ModuleType:
    """Two classes: 6 images of a cat, wide and all red, and 6 of a dog, high and grey."""
    for number in range(6):
        red = np.zeros((20, 40, 3), np.uint8)
        red[:, 10:30, 0] = 255  # what the crop keeps
        image(project, f"cat/{number}.png", red)
        image(project, f"dog/{number}.png", np.full((40, 20), 51, np.uint8))
    keys = {
        "kind": "images",
        "folder": "images",
        "image_size": 8,
        "workers": 0,
        "validation_fraction": 0.25,
        **more,
    }
    return project.load(keys, IMPORTED)


def test_images_are_scaled_cropped_and_normalised(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    data = image_data(project)
    train, held_out = data.load_data(project.out, 2)
    assert (len(train), len(held_out)) == (9, 3)
    samples = [*(train[index] for index in range(9)), *(held_out[index] for index in range(3))]
    assert sorted(int(target) for _, target in samples) == [0] * 6 + [1] * 6
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for pixels, target in samples:
        assert pixels.shape == (3, 8, 8) and pixels.dtype == torch.float32 and target.shape == ()
        colour = torch.tensor([1.0, 0.0, 0.0]) if target == 0 else torch.full((3,), 0.2)
        middle = pixels[:, 2:6, 2:6].flatten(1)
        torch.testing.assert_close(middle, ((colour - mean) / deviation)[:, None].expand(3, 16))
    data.load_data(project.out, 2)
    assert capsys.readouterr().out.count("12 data files") == 1


def test_each_place_in_training_has_its_own_variant_of_an_image(project: Project) -> None:
    """Those of a place are the same on any number of ranks; validation has the images as they
    are, and the random numbers of the process are left alone.
    """
    data = image_data(project, augment=True)
    project.rank(data, 0, 1)
    noise = np.random.default_rng(0)
    for path in sorted((project.folder / "images").rglob("*.png")):
        Image.fromarray(noise.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    train, held_out = data.load_data(project.out, 2)
    before = torch.get_rng_state()
    loader = data.GlobalBatches(train, 4, 2, seed=3)
    epochs = [torch.cat([b[0] for b in loader.micro_batches(p)]) for p in (0, 4, 8, 12)]
    again = data.GlobalBatches(train, 4, 1, seed=3)
    one_by_one = [torch.cat([b[0] for b in again.micro_batches(p)]) for p in (0, 4, 8, 12)]
    assert all(map(torch.equal, epochs, one_by_one))
    drawn = data.Augmented(train, 3)
    variants = [drawn[position, 0][0] for position in range(40)]
    assert all(image.shape == (3, 8, 8) for image in variants)
    assert len({image.numpy().tobytes() for image in variants}) > 3
    assert torch.equal(drawn[7, 0][0], variants[7])
    other = [data.Augmented(train, 4)[position, 0][0] for position in range(40)]
    assert not all(map(torch.equal, other, variants))
    plain = torch.stack([held_out[index][0] for index in range(2)])
    fixed = next(loader.fixed_batches(held_out, 1))[0]
    assert torch.equal(fixed[: len(plain)], plain[: len(fixed)])
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_images(project: Project) -> None:
    data = image_data(project)
    with pytest.raises(data.SetupError, match=r"images has 2 .* 3 classes"):
        data.load_data(project.out, 3)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    for name in ("dog/5.png", "dog/5.jpg", "dog/5.bmp"):
        image(project, name, noise)
        path = project.folder / "images" / name
        path.write_bytes(path.read_bytes()[:-300])
        with pytest.raises(data.SetupError, match=rf"{name} cannot be decoded: "):
            data.load_data(project.out, 2)
        path.unlink()
    (project.folder / "images" / "dog" / "notes.txt").write_text("no image")
    with pytest.raises(data.SetupError, match=r"notes\.txt cannot be decoded: "):
        data.load_data(project.out, 2)
    for path in (project.folder / "images" / "dog").iterdir():
        path.unlink()
    with pytest.raises(data.SetupError, match="dog holds no image"):
        data.load_data(project.out, 2)


def test_pillow_is_asked_for(project: Project) -> None:
    data = image_data(project)
    project.monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(data.SetupError, match="pip install pillow"):
        data.load_data(project.out, 2)


@pytest.mark.full
@pytest.mark.launch
def test_the_example_with_images(tmp_path: Path) -> None:
    folder = tmp_path / "vit"
    shutil.copytree(ROOT / "examples" / "vit", folder)
    python("draw.py", "images", cwd=folder)
    loaded = spec.load(folder / "spec.yaml", ["data.augment=true"])
    scaffold.write(scaffold.render(loaded), folder / "run")
    shutil.copy(folder / "vit.py", folder / "run")
    verdict = verify(resolve(folder / "run", {}), tmp_path / "work", tier="simulate")
    assert [f.rule for f in verdict.findings if f.status not in ("pass", "not_applicable")] == []
    assert verdict.facts["groups"] == 3 and verdict.facts["sharded"] == verdict.facts["parameters"]
