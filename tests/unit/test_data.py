"""Images: read from the real file formats, in an order that is a function of the seed, augmented alike wherever they are read."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from nofm.data.arrays import Arrays, read_arrays
from nofm.data.errors import DataError
from nofm.data.loader import ResidentLoader, batches, crop_and_flip
from nofm.data.order import Order, Share, mix
from nofm.data.workers import ArrayImages, FolderImages, WorkerLoader

CPU = torch.device("cpu")


def take(iterator, count: int) -> list[dict[str, torch.Tensor]]:
    return [next(iterator) for _ in range(count)]


# ---- order ----


def test_an_epoch_is_a_permutation_without_the_rest():
    order = Order(size=23, batch=5, seed=1)
    assert order.steps_per_epoch == 4
    seen = torch.cat([order.indices(step) for step in range(4)])
    assert len(seen) == len(set(seen.tolist())) == 20
    assert not torch.equal(seen, torch.cat([order.indices(step) for step in range(4, 8)]))


def test_the_images_of_a_step_do_not_depend_on_the_steps_before():
    straight, jumping = Order(100, 10, seed=4), Order(100, 10, seed=4)
    expected = [straight.indices(step) for step in range(35)]
    for step in (34, 3, 12, 11, 0):
        assert torch.equal(jumping.indices(step), expected[step])
    assert not torch.equal(Order(100, 10, seed=5).indices(0), expected[0])


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_processes_and_micro_batches_share_the_batch(world, accumulate):
    batch = torch.arange(16)
    parts = [Share(rank, world, accumulate).micro_batches(batch) for rank in range(world)]
    assert all(len(micro) == accumulate for micro in parts)
    # Micro-batch by micro-batch, the processes together see the batch in its order.
    joined = [torch.cat([parts[rank][i] for rank in range(world)]) for i in range(accumulate)]
    assert torch.equal(torch.cat(joined), batch)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(DataError, match=r"engine.batch_size = 9: there are only 8"):
        Order(8, 9, seed=0)


def test_mixed_seeds_differ():
    assert len({mix(a, b) for a in range(30) for b in range(30)}) == 900
    assert mix(1, 23) != mix(12, 3)


# ---- arrays ----


def test_digits_are_split_and_scaled():
    digits = read_arrays("digits", None)
    assert (len(digits.train_labels), len(digits.test_labels)) == (1437, 360)
    loader = ResidentLoader(digits, Order(1437, 64, 0), Share(), CPU)
    batch = next(batches(loader, 0))
    assert batch["image"].shape == (64, 1, 8, 8)
    assert -0.31 < batch["image"].min() < batch["image"].max() < 0.71
    assert sum(len(b["label"]) for b in loader.test()) == 360


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_fashion(root: Path, zipped: bool) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):
        for kind, data in (("images-idx3", images), ("labels-idx1", np.arange(20, dtype=np.uint8) % 10)):
            raw = idx(data)
            path = root / (f"{part}-{kind}-ubyte" + (".gz" if zipped else ""))
            path.write_bytes(gzip.compress(raw) if zipped else raw)
    return images


@pytest.mark.parametrize("zipped", [False, True])
def test_fashion_reads_idx_files(zipped, tmp_path):
    images = write_fashion(tmp_path, zipped)
    read = read_arrays("fashion", str(tmp_path))
    assert torch.equal(read.train_NCHW[:, 0], torch.from_numpy(images))
    assert read.test_labels.tolist() == [i % 10 for i in range(20)]


def test_fashion_names_the_file_that_is_wrong(tmp_path):
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        read_arrays("fashion", str(tmp_path))
    write_fashion(tmp_path, zipped=False)
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte: .*cut short"):
        read_arrays("fashion", str(tmp_path))


def test_fashion_names_an_archive_that_is_damaged_inside(tmp_path):
    write_fashion(tmp_path, zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    damaged = bytearray(path.read_bytes())
    damaged[10:20] = b"\xff" * 10  # where the packed data begin
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: cannot be read \(Error -3 while decompressing"):
        read_arrays("fashion", str(tmp_path))


def write_cifar(root: Path, kind: str) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8), [int(x) for x in rng.integers(0, 10, 12)]
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part, tags = images[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2]
        if kind == "png":
            Image.fromarray(part.reshape(2, 1024, 3)).save(root / f"{name}.png")
        else:
            (root / "cifar-10-batches-bin").mkdir(exist_ok=True)
            records = b"".join(bytes([t]) + x.transpose(2, 0, 1).tobytes() for x, t in zip(part, tags, strict=True))
            (root / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(records)
    if kind == "png":
        (root / "train_lables.json").write_text(json.dumps(labels[:10]))
        (root / "test_lables.json").write_text(json.dumps(labels[10:]))
    return images, labels


@pytest.mark.parametrize("kind", ["png", "binary"])
def test_cifar_reads_sheets_and_binary_files(kind, tmp_path):
    images, labels = write_cifar(tmp_path, kind)
    read = read_arrays("cifar10", str(tmp_path))
    assert torch.equal(read.train_NCHW, torch.from_numpy(images[:10]).permute(0, 3, 1, 2))
    assert torch.equal(read.test_NCHW, torch.from_numpy(images[10:]).permute(0, 3, 1, 2))
    assert [*read.train_labels.tolist(), *read.test_labels.tolist()] == labels


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda root: (root / "data_batch_3.png").write_bytes(b"no picture"), "data_batch_3.png: cannot be read"),
        (lambda root: (root / "train_lables.json").write_text("[1, 2"), "train_lables.json: no list of labels"),
        (lambda root: (root / "train_lables.json").write_text("[1, 2]"), "10 training images have 2 labels"),
        (lambda root: (root / "test_lables.json").write_text("[1, 10]"), "test labels run from 1 to 10"),
        (lambda root: (root / "test_batch.png").unlink(), "no CIFAR-10 there"),
    ],
)
def test_cifar_names_what_is_wrong(damage, told, tmp_path):
    write_cifar(tmp_path, "png")
    damage(tmp_path)
    with pytest.raises(DataError, match=told):
        read_arrays("cifar10", str(tmp_path))


# ---- augmentation ----


def test_crops_and_flips_are_those_of_each_image():
    x = torch.arange(6 * 2 * 5 * 4).view(6, 2, 5, 4).float() + 1
    draws = torch.tensor([[0, 0, 0], [2, 2, 0], [1, 1, 1], [0, 2, 1], [2, 0, 0], [1, 2, 0]])
    made = crop_and_flip(x, draws, pad=1)
    for i, (dy, dx, flip) in enumerate(draws.tolist()):
        padded = torch.zeros(2, 7, 6)
        padded[:, 1:6, 1:5] = x[i]
        expected = padded[:, dy : dy + 5, dx : dx + 4]
        assert torch.equal(made[i], expected.flip(-1) if flip else expected)


def test_a_resident_loader_is_the_same_from_any_step_and_for_any_number_of_processes():
    digits = read_arrays("digits", None)
    make = lambda **share: ResidentLoader(digits, Order(1437, 32, 7), Share(**share), CPU, crop=2, flip=True)  # noqa: E731
    straight = take(batches(make(), 0), 50)
    later = take(batches(make(), 45), 5)
    for a, b in zip(straight[45:], later, strict=True):
        assert torch.equal(a["image"], b["image"])
        assert torch.equal(a["label"], b["label"])
    halves = [take(batches(make(rank=rank, world=2), 0), 3) for rank in (0, 1)]
    for step in range(3):
        assert torch.equal(torch.cat([halves[0][step]["image"], halves[1][step]["image"]]), straight[step]["image"])
    quarters = take(batches(make(accumulate=4), 0), 4)
    assert torch.equal(torch.cat([q["image"] for q in quarters]), straight[0]["image"])


def worker_loader(workers: int, seed: int = 7, crop: int = 2) -> WorkerLoader:
    images = ArrayImages(read_arrays("digits", None), crop, flip=True)
    return WorkerLoader(images, Order(images.train_size, 16, seed), Share(), workers, pin=False, skip=False)


def test_a_worker_loader_is_the_same_from_any_step_with_any_number_of_processes():
    alone, helped = worker_loader(0), worker_loader(2)
    straight = take(batches(alone, 0), 6)
    later = take(batches(helped, 4), 2)
    helped.close()
    for a, b in zip(straight[4:], later, strict=True):
        assert torch.equal(a["image"], b["image"])
    assert not torch.equal(take(batches(worker_loader(0, seed=8), 0), 1)[0]["image"], straight[0]["image"])


def test_reading_images_does_not_touch_the_generator_of_dropout():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(batches(worker_loader(0), 0), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_image_is_augmented_anew_in_every_epoch():
    loader = worker_loader(0)
    per_epoch = loader.order.steps_per_epoch
    first = {int(i): x for i, x in zip(loader.order.indices(0), take(batches(loader, 0), 1)[0]["image"], strict=True)}
    again = [
        (int(i), x)
        for step in range(3)
        for i, x in zip(loader.order.indices(per_epoch + step), take(batches(loader, per_epoch + step), 1)[0]["image"], strict=True)
    ]
    shared = [(first[i], x) for i, x in again if i in first]
    assert shared
    assert any(not torch.equal(a, b) for a, b in shared)


# ---- folders ----


@pytest.fixture
def folder(tmp_path) -> Path:
    rng = np.random.default_rng(2)
    for part, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (40, 30 + i, 3), dtype=np.uint8)).save(tmp_path / part / name / f"{i}.jpg")
    return tmp_path


def folder_loader(root: Path, workers: int = 0, skip: bool = False) -> WorkerLoader:
    images = FolderImages(str(root), 16, flip=True)
    return WorkerLoader(images, Order(images.train_size, 4, 0), Share(), workers, pin=False, skip=skip)


def test_a_folder_is_read_as_imagenet_is_laid_out(folder):
    loader = folder_loader(folder)
    taken = take(batches(loader, 0), 3)
    assert all(b["image"].shape == (4, 3, 16, 16) for b in taken)
    assert sorted(torch.cat([b["label"] for b in taken]).tolist()) == [0] * 6 + [1] * 6
    assert torch.cat([b["label"] for b in loader.test()]).tolist() == [0, 0, 1, 1]


def sixteen_bits() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((20, 20), 900, np.uint16)).save(file, "PNG")  # grey, which Pillow would make white
    return file.getvalue()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xd8\xff not a jpeg", None, sixteen_bits()], ids=["empty", "garbage", "cut short", "16 bits"]
)
def test_a_corrupt_image_is_named_or_skipped_and_counted(folder, workers, content):
    broken = folder / "train" / "dog" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200] if content is None else content)
    loader = folder_loader(folder, workers)
    with pytest.raises(DataError, match=r"dog/3.jpg: this image cannot be read .*data.corrupt skip"):
        take(batches(loader, 0), 3)
    loader.close()
    skipping = folder_loader(folder, workers, skip=True)
    taken = take(batches(skipping, 0), 3)
    skipping.close()
    assert skipping.skipped == 1
    assert sum(len(b["label"]) for b in taken) == 12


def test_odd_but_readable_pictures_are_read(folder):
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "train" / "cat" / "grey.png")
    Image.fromarray(np.zeros((9, 9, 4), np.uint8)).save(folder / "train" / "cat" / "alpha.png")
    Image.fromarray(np.zeros((9, 9, 4), np.uint8), "CMYK").save(folder / "train" / "cat" / "cmyk.jpg")
    loader = folder_loader(folder)
    assert all(b["image"].shape[1] == 3 for b in take(batches(loader, 0), loader.order.steps_per_epoch))


def test_a_data_set_of_nothing_but_broken_images_ends(folder):
    for path in (folder / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no image of this data set can be read"):
        take(batches(folder_loader(folder, skip=True), 0), 1)


def test_classes_must_agree(folder):
    (folder / "train" / "emu").mkdir()
    with pytest.raises(DataError, match=r"emu: this class has no image"):
        FolderImages(str(folder), 16, flip=False)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "train" / "emu" / "x.png")
    with pytest.raises(DataError, match="class 'emu' is in only one of train/ and val/"):
        FolderImages(str(folder), 16, flip=False)


def test_labels_and_images_must_agree():
    x = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    with pytest.raises(DataError, match="3 training images have 2 labels"):
        Arrays(x, torch.zeros(2).long(), x, torch.zeros(3).long(), (0.0,), (1.0,))


def test_torchvisions_cifar10_as_bin_files(tmp_path):
    spec = importlib.util.spec_from_file_location("cifar10_bin", Path(__file__).parents[2] / "examples" / "cifar10_bin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    chance = np.random.default_rng(0)
    train, test = (
        SimpleNamespace(data=chance.integers(0, 256, (count, 32, 32, 3), np.uint8), targets=[i % 10 for i in range(count)])
        for count in (10, 4)
    )
    module.write(train, test, tmp_path / "out")
    arrays = read_arrays("cifar10", str(tmp_path / "out"))
    for (images, labels), there in zip(
        ((arrays.train_NCHW, arrays.train_labels), (arrays.test_NCHW, arrays.test_labels)), (train, test), strict=True
    ):
        assert torch.equal(images, torch.from_numpy(there.data).permute(0, 3, 1, 2))
        assert labels.tolist() == there.targets
