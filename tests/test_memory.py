"""What a train step on JAX needs beside its arguments, by XLA's own analysis.

It has no noise: the same program gives the same number.
"""

import functools

import keras
import numpy as np
import pytest
from models import Net

pytestmark = pytest.mark.backend("jax")
LENGTH, WIDTH, PIECE = 32, 128, 8


def transformer(cls):
    """Attention makes the activations larger than the gradients."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(100, WIDTH)(inputs)
    for _ in range(2):
        attention = keras.layers.MultiHeadAttention(4, WIDTH // 4)
        x = keras.layers.LayerNormalization()(x + attention(x, x))
        hidden = keras.layers.Dense(4 * WIDTH, "gelu")(x)
        x = x + keras.layers.Dense(WIDTH)(hidden)
    return cls(inputs, keras.layers.Dense(100)(x))


def encoder(cls):
    """The same with an embedding of the text for an output."""
    net = transformer(keras.Model)
    x = keras.layers.GlobalAveragePooling1D()(net.layers[-2].output)
    return cls(net.input, keras.layers.Dense(16)(x))


def wide(cls):
    """The gradients are larger than the activations."""
    inputs = x = keras.Input((512,))
    for _ in range(3):
        x = keras.layers.Dense(512, "relu")(x)
    return cls(inputs, keras.layers.Dense(10)(x))


def contrastive(y_true, y_pred):
    """Every sample is told from all others of the batch."""
    z = keras.ops.normalize(y_pred, axis=-1)
    logits = keras.ops.matmul(z, keras.ops.transpose(z))
    return keras.ops.mean(keras.ops.logsumexp(logits, axis=1))


def data(build, rows):
    if build is not wide:
        tokens = np.arange(rows * LENGTH).reshape(rows, LENGTH) % 100
        return tokens.astype("int32"), tokens.astype("int32")
    return np.ones((rows, 512), "float32"), np.arange(rows) % 10


@functools.cache
def needs(cls, build, rows, **options):
    """Bytes beside what goes in and comes out, and bytes of the weights."""
    import jax

    model = build(cls)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if build is encoder:
        model.compile("sgd", contrastive, **options)
    else:
        model.compile("sgd", loss, metrics=["accuracy"], **options)
    batch = data(build, rows)
    # Creates the variables of the metrics, the optimizer and the window.
    model.test_on_batch(*(v[:1] for v in batch))
    model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    kinds = ("trainable", "non_trainable", "optimizer", "metrics")
    state = model._get_jax_state(**{f"{k}_variables": True for k in kinds})
    model.jax_state_sync()
    step = jax.jit(model.train_step, donate_argnums=0)
    analysis = step.lower(state, batch).compile().memory_analysis()
    weights = sum(w.nbytes for w in model.get_weights())
    return analysis.temp_size_in_bytes, weights


ROWS = {"even": 4 * PIECE, "ragged": 4 * PIECE - 4, "one and a half": 12}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("build", [transformer, wide])
def test_a_piece_and_the_gradients(build, rows):
    """At most the stock step on one piece and 1.35 copies of the gradients."""
    piece, gradients = needs(keras.Model, build, PIECE)
    ours, _ = needs(Net, build, rows, micro_batch_size=PIECE)
    limit = piece + 1.35 * gradients
    assert ours <= limit, (ours, piece, gradients)
    # The whole batch fails it, where there are activations to save.
    if build is transformer and rows > 12:
        assert needs(keras.Model, build, rows)[0] > limit


def test_a_loss_over_the_batch_at_an_eighth_of_it():
    """Both passes of all pieces take at most 0.3 of the whole batch."""
    whole, _ = needs(keras.Model, encoder, 16 * PIECE)
    options = {"micro_batch_size": 2 * PIECE, "loss_over": "batch"}
    ours, _ = needs(Net, encoder, 16 * PIECE, **options)
    assert ours <= 0.3 * whole, (ours, whole)
    print(ours / whole)
