"""IDX files: round trips of every type, and one error per fault."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks.mlp import idx_files
from benchmarks.mlp.digits import IMAGES, LABELS, draw_digits, load_digits, write_digits
from jcuts.base.errors import JcutsError

HEADER = bytes.fromhex("00000803 00000002 00000002 00000003")
"""Of two images of 2 x 3 bytes, as the format's page writes it."""


def test_bytes_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(HEADER + bytes(range(12)))
    assert np.array_equal(idx_files.read(path), np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    idx_files.write(tmp_path / "copy", idx_files.read(path))
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_round_trip(tmp_path: Path, dtype: str, name: str) -> None:
    array = np.arange(-6, 6).reshape(3, 4).astype(dtype)
    idx_files.write(tmp_path / name, array)
    found = idx_files.read(tmp_path / name)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (b"", idx_files.IdxHeaderError, "nothing"),
        (b"\x89PNG\r\n", idx_files.IdxHeaderError, "89 50 4e 47"),
        (b"\0\0\x0a\x01" + bytes(4), idx_files.IdxHeaderError, "0x0a"),
        (HEADER[:10], idx_files.IdxLengthError, "16 bytes"),
        (HEADER + bytes(11), idx_files.IdxLengthError, "28 expected"),
        (HEADER + bytes(13), idx_files.IdxLengthError, "28 expected"),
        (gzip.compress(HEADER + bytes(12), mtime=0)[:-9], idx_files.IdxLengthError, "damaged"),
    ],
)
def test_faults(tmp_path: Path, data: bytes, kind: type[idx_files.IdxError], said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(kind, match=said) as caught:
        idx_files.read(path)
    assert caught.value.path == path
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.path) == (kind, str(caught.value), path)
    assert isinstance(copy, JcutsError)


def test_a_missing_file_and_a_type_that_idx_lacks(tmp_path: Path) -> None:
    with pytest.raises(idx_files.IdxError, match="cannot be read"):
        idx_files.read(tmp_path / "none")
    with pytest.raises(idx_files.IdxContentError, match="complex"):
        idx_files.write(tmp_path / "none", np.zeros(2, complex))


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (np.zeros((2, 4), np.uint8), np.zeros(2, np.uint8), "3 axes"),
        (np.zeros((2, 4, 4), np.int32), np.zeros(2, np.uint8), "uint8"),
        (np.zeros((2, 4, 4), np.uint8), np.zeros((2, 1), np.uint8), "1 axis"),
        (np.zeros((2, 4, 4), np.uint8), np.zeros(3, np.uint8), "3 labels for 2 images"),
        (np.zeros((2, 4, 4), np.uint8), np.array([1, 10], np.uint8), "label 10"),
    ],
)
def test_images_and_labels_must_fit(tmp_path: Path, images: np.ndarray, labels: np.ndarray, said: str) -> None:
    idx_files.write(tmp_path / "x", images)
    idx_files.write(tmp_path / "y", labels)
    with pytest.raises(idx_files.IdxContentError, match=said):
        idx_files.read_labelled(tmp_path / "x", tmp_path / "y")


def test_generated_digits_are_a_data_set(tmp_path: Path) -> None:
    write_digits(tmp_path, 50, seed=1)
    images, labels = draw_digits(50, seed=1)
    data = load_digits(tmp_path)
    assert (data.x.shape, data.x_validation.shape) == ((45, 784), (5, 784))
    assert np.array_equal(np.concatenate([data.x, data.x_validation]), images.reshape(50, 784))
    assert np.array_equal(np.concatenate([data.labels, data.labels_validation]), labels)
    assert np.array_equal(data.y.argmax(1), data.labels)
    assert (images.max((1, 2)) > 200).all()
    assert (images == 0).mean() > 0.5
    (tmp_path / f"{IMAGES}.gz").write_bytes(gzip.compress((tmp_path / IMAGES).read_bytes()))
    (tmp_path / IMAGES).unlink()
    assert np.array_equal(load_digits(tmp_path, 10).x, data.x[:9])
    (tmp_path / LABELS).write_bytes(struct.pack(">HBBI", 0, 8, 1, 0))
    with pytest.raises(idx_files.IdxContentError, match="0 labels for 50 images"):
        load_digits(tmp_path)
