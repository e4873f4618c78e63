"""The images that the proof trains on."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import keras
import numpy as np

KEYS = ("x_train", "y_train", "x_test", "y_test")


class Data(NamedTuple):
    """Images, flattened and scaled to [0, 1], with their labels.

    Attributes:
        x_train: Float32 array of shape `(samples, pixels)`.
        y_train: Int array of shape `(samples,)`.
        x_test: As `x_train`, for validation.
        y_test: As `y_train`, for validation.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def classes(self) -> int:
        """Number of classes."""
        return 1 + int(max(self.y_train.max(), self.y_test.max()))

    def first(self, samples: int | None) -> Data:
        """Returns the data with the first training samples only.

        Args:
            samples: How many to keep, `None` for all of them.

        Returns:
            The data; validation samples are all kept.

        Raises:
            ValueError: There are fewer samples.
        """
        available = len(self.x_train)
        if samples is not None and samples > available:
            raise ValueError(
                f"`--samples` must be at most {available}, the size of the "
                f"training data. Received: --samples {samples}."
            )
        return self._replace(
            x_train=self.x_train[:samples], y_train=self.y_train[:samples]
        )


def digits() -> Data:
    """Returns scikit-learn's handwritten digits, 1437 to train and 360 to test.

    Returns:
        The data, split in an order that does not depend on the run's seed.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "`--data digits` needs scikit-learn. Install it with "
            '`pip install "accumkit[demo]"`.'
        ) from error
    x, y = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(x))
    train, test = np.split(order, [1437])
    return _prepared(x[train], y[train], x[test], y[test])


def mnist(npz: pathlib.Path | None = None) -> Data:
    """Returns MNIST, or other images from a file of the same layout.

    Args:
        npz: File with the arrays `x_train`, `y_train`, `x_test` and `y_test`.
            Defaults to `None`: what `keras.datasets.mnist` downloads.

    Returns:
        The data.

    Raises:
        OSError: The file can't be read.
        ValueError: The file lacks one of the arrays.
    """
    if npz is None:
        (x, y), (x_test, y_test) = keras.datasets.mnist.load_data()
        return _prepared(x, y, x_test, y_test)
    with np.load(npz) as arrays:
        missing = [key for key in KEYS if key not in arrays]
        if missing:
            raise ValueError(
                f"`--npz` must name a file with the arrays {list(KEYS)}. "
                f"Received: {npz}, which has {list(arrays)}."
            )
        return _prepared(*(arrays[key] for key in KEYS))


def _prepared(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray
) -> Data:
    scale = x.max()
    return Data(
        x_train=(x / scale).astype("float32").reshape(len(x), -1),
        y_train=y.astype("int32"),
        x_test=(x_test / scale).astype("float32").reshape(len(x_test), -1),
        y_test=y_test.astype("int32"),
    )
