"""The images that the proof trains on."""

from __future__ import annotations

import pathlib
import zipfile
from typing import NamedTuple

import keras
import numpy as np

KEYS = ("x_train", "y_train", "x_test", "y_test")
# Among them what a lone array raises, which is no file of several.
_UNREADABLE = (
    ValueError,
    TypeError,
    AttributeError,
    EOFError,
    zipfile.BadZipFile,
)


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


def mnist() -> Data:
    """Returns MNIST, from Keras's cache or downloaded.

    Returns:
        The data.

    Raises:
        OSError: It can't be downloaded.
    """
    try:
        (x, y), (x_test, y_test) = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises no narrower one
        raise OSError(
            f"MNIST could not be downloaded ({' '.join(str(error).split())}). "
            "Where you have it as an .npz file, such as Keras keeps in "
            "~/.keras/datasets/mnist.npz, give that: --data PATH. Without "
            "`--data`, the digits that come with scikit-learn are taken."
        ) from error
    return _prepared(x, y, x_test, y_test)


def images(path: pathlib.Path, option: str = "--data") -> Data:
    """Returns images from a file that is laid out as Keras's `mnist.npz`.

    Args:
        path: File with the arrays `x_train`, `y_train`, `x_test` and `y_test`.
        option: What names it on the command line, for the messages.

    Returns:
        The data.

    Raises:
        OSError: The file can't be read.
        ValueError: It is no such file.
    """
    words = "be digits, mnist or" if option == "--data" else "name"
    rule = f"`{option}` must {words} an .npz file with the arrays {list(KEYS)}."
    try:
        # Opened here: NumPy leaves a damaged file open.
        with path.open("rb") as opened, np.load(opened) as file:
            arrays = {key: file[key] for key in file}
    except FileNotFoundError as error:
        raise OSError(f"{rule} No such file: {path}") from error
    except _UNREADABLE as error:
        raise ValueError(f"{rule} Received: {path} ({error}).") from error
    if not set(KEYS) <= set(arrays):
        raise ValueError(f"{rule} Received: {path}, which has {list(arrays)}.")
    shapes = {key: arrays[key].shape for key in KEYS}
    lengths = [shape[0] if shape else 0 for shape in shapes.values()]
    if 0 in lengths or lengths[::2] != lengths[1::2]:
        raise ValueError(
            f"{rule} There must be a label for each image. Received: {path} "
            f"with the shapes {shapes}."
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
