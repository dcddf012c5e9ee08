"""IDX files, generated data, models and the order of samples."""

from __future__ import annotations

import gzip
import struct
import tempfile
from pathlib import Path

import pytest

from examples import examples

pytest.importorskip("torch")
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_train.args import parse_arguments
from ddp_train.data import load_data, synthetic_images, synthetic_regression
from ddp_train.errors import TrainError
from ddp_train.idx import read_idx, read_training_set
from ddp_train.models import batch_loss, build_model, build_optimizer
from ddp_train.tensors import bytes_tensor, model_digest, tensor_bytes


def idx_bytes(shape: tuple[int, ...], payload: bytes) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + payload


def write_set(folder: Path, count: int, labels: bytes | None = None, suffix: str = "") -> None:
    pixels = bytes(i * 7 % 256 for i in range(count * 784))
    labels = bytes(i % 10 for i in range(count)) if labels is None else labels
    for name, data in (
        ("train-images-idx3-ubyte", idx_bytes((count, 28, 28), pixels)),
        ("train-labels-idx1-ubyte", idx_bytes((len(labels),), labels)),
    ):
        packed = gzip.compress(data) if suffix else data
        (folder / f"{name}{suffix}").write_bytes(packed)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reads_images_and_labels(tmp_path: Path, suffix: str) -> None:
    write_set(tmp_path, 12, suffix=suffix)
    images, labels = read_training_set(tmp_path)
    assert tuple(images.shape) == (12, 28, 28)
    assert labels.tolist() == [i % 10 for i in range(12)]
    assert images.flatten()[:5].tolist() == [0, 7, 14, 21, 28]
    assert images[1, 0, 0].item() == 784 * 7 % 256


@examples(60)
@given(data=st.data(), packed=st.booleans())
def test_any_truncation_or_addition_is_refused_by_name(data: st.DataObject, packed: bool) -> None:
    whole = idx_bytes((3, 4, 5), bytes(range(60)))
    content = gzip.compress(whole) if packed else whole
    cut = data.draw(st.integers(0, len(content) - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("images.gz" if packed else "images")
        path.write_bytes(content)
        assert read_idx(path, 3).flatten().tolist() == list(range(60))
        path.write_bytes(content[:cut])
        with pytest.raises(TrainError, match="images") as caught:
            read_idx(path, 3)
        assert caught.value.exit_code == 2
        assert "\n" not in caught.value.message
        path.write_bytes(gzip.compress(whole + b"x") if packed else whole + b"x")
        with pytest.raises(TrainError, match="more than the 60"):
            read_idx(path, 3)


@examples(100)
@given(content=st.binary(max_size=64), suffix=st.sampled_from(["", ".gz"]))
def test_random_bytes_never_give_a_traceback(content: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"images{suffix}"
        path.write_bytes(content)
        with pytest.raises(TrainError):
            read_idx(path, 3)


def test_header_that_claims_more_than_memory_holds(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(idx_bytes((2**32 - 1, 2**20, 2**10), b"abc"))
    with pytest.raises(TrainError, match="truncated: 3 of"):
        read_idx(path, 3)


def test_faults_between_the_two_files(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="neither train-images"):
        read_training_set(tmp_path)
    with pytest.raises(TrainError, match="not a folder"):
        read_training_set(tmp_path / "absent")
    write_set(tmp_path, 4, labels=bytes(3))
    with pytest.raises(TrainError, match=r"train-labels-idx1-ubyte: 3 labels for 4 images"):
        read_training_set(tmp_path)
    write_set(tmp_path, 4, labels=bytes((1, 2, 10, 3)))
    with pytest.raises(TrainError, match="label 10"):
        read_training_set(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes((4, 27, 28), bytes(4 * 27 * 28)))
    with pytest.raises(TrainError, match="27 x 28"):
        read_training_set(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes((4,), bytes(4)))
    with pytest.raises(TrainError, match="train-images-idx3-ubyte: bad magic number 00000801"):
        read_training_set(tmp_path)


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_folder_feeds_every_model(tmp_path: Path, model: str) -> None:
    write_set(tmp_path, 12)
    data = load_data(parse_arguments(["1", "1", "--data", str(tmp_path), "--model", model]))
    assert len(data) == 12
    inputs, targets = data.batch([3, 0], "cpu")
    assert inputs.dtype == torch.float32
    assert targets.tolist() == [3, 0]
    assert build_model(model, data.classes)(inputs).shape == (2, 10)
    few = load_data(parse_arguments(["1", "1", "--data", str(tmp_path), "--dataset_size", "5"]))
    assert len(few) == 5
    with pytest.raises(TrainError, match="holds only 12"):
        load_data(parse_arguments(["1", "1", "--data", str(tmp_path), "--dataset_size", "13"]))


@pytest.mark.parametrize("make", [synthetic_regression, synthetic_images])
def test_generated_data_depends_on_the_seed_only(make) -> None:  # type: ignore[no-untyped-def]
    state = torch.get_rng_state()
    first = make(64, 5)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(99)
    assert make(64, 5).digest() == first.digest()
    assert make(64, 6).digest() != first.digest()
    torch.set_rng_state(state)


@pytest.mark.parametrize(("model", "images"), [("linear", False), ("mlp", False), ("cnn", True)])
def test_models_learn_and_no_gradient_is_always_zero(model: str, images: bool) -> None:
    torch.manual_seed(0)
    data = (synthetic_images if images else synthetic_regression)(512, 0)
    network = build_model(model, data.classes)
    optimizer = build_optimizer(network, 0.01)
    inputs, targets = data.batch(list(range(512)), "cpu")
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = batch_loss(network(inputs), targets, data.classes)
        loss.backward()
        assert all(float(p.grad.abs().max()) > 0 for p in network.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_linear_is_the_bare_layer_of_older_scripts() -> None:
    state = build_model("linear", False).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {"weight": (1, 20), "bias": (1,)}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_together_see_the_batches_of_one_process(world: int) -> None:
    """The union of the ranks' k-th batches of b is the k-th batch of b * world of one process."""
    batch, size = 4, 4 * world * 6

    def order(replicas: int, rank: int, epoch: int) -> list[int]:
        sampler = torch.utils.data.distributed.DistributedSampler(
            synthetic_regression(size, 0), num_replicas=replicas, rank=rank, seed=3
        )
        sampler.set_epoch(epoch)
        return list(sampler)

    for epoch in (0, 1):
        alone = order(1, 0, epoch)
        ranks = [order(world, rank, epoch) for rank in range(world)]
        for k in range(6):
            union = {i for one in ranks for i in one[k * batch : (k + 1) * batch]}
            assert union == set(alone[k * batch * world : (k + 1) * batch * world])
    assert order(1, 0, 0) != order(1, 0, 1)


@given(payload=st.binary(max_size=200))
def test_bytes_survive_a_tensor(payload: bytes) -> None:
    assert tensor_bytes(bytes_tensor(payload)) == payload


def test_digest_sees_every_byte() -> None:
    model = build_model("mlp", False)
    before = model_digest(model)
    assert model_digest(model) == before
    with torch.no_grad():
        last = list(model.parameters())[-1]
        last.copy_(torch.nextafter(last, torch.tensor(10.0)))
    assert model_digest(model) != before


def test_bytes_of_a_strided_view_are_in_row_order() -> None:
    view = torch.arange(6, dtype=torch.uint8).reshape(2, 3).t()
    assert tensor_bytes(view) == bytes((0, 3, 1, 4, 2, 5))


def test_a_folder_of_data_that_cannot_be_searched_is_one_message() -> None:
    with pytest.raises(TrainError, match=r"cannot be read|is not a folder"):
        read_training_set(Path("a" * 300))
