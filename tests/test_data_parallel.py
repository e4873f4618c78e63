"""Four devices on one processor through `keras.distribution` (JAX)."""

import keras
import numpy as np
import pytest
from models import (
    Net,
    distance,
    fit_in_order,
    iterations,
    mlp,
    regression_data,
    tagger,
    token_data,
)

from accumkit import AccumulationOptimizer, optimizer_steps
from accumkit.callbacks import EffectiveStepLogger, OptimizerRemainder

pytestmark = pytest.mark.backend("jax")


@pytest.fixture
def parallel():
    """Spreads whatever is built after it over the four devices."""
    assert len(keras.distribution.list_devices()) == 4

    def spread():
        distribution = keras.distribution.DataParallel()
        keras.distribution.set_distribution(distribution)

    yield spread
    keras.distribution.set_distribution(None)


def adam():
    return keras.optimizers.Adam(0.02, epsilon=1e-3)


def train(build, cls, data, batch, optimizer=None, **options):
    loss = options.pop("loss", "mse")
    callbacks = options.pop("callbacks", [])
    model = build(cls)
    model.compile(optimizer or adam(), loss, **options)
    start, logs = fit_in_order(
        model, data, batch, validation_data=data[:2], callbacks=callbacks
    )
    return model, start, logs


def devices_of(model):
    return [len(v.value.sharding.device_set) for v in model.weights]


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (4, {"accumulation_steps": 4}),
        (16, {"micro_batch_size": 4}),
        # Fewer samples than devices: one on each is the least that there is.
        (16, {"micro_batch_size": 3}),
        # The last piece is smaller than the others.
        (16, {"micro_batch_size": 12}),
        (8, {"accumulation_steps": 2, "micro_batch_size": 4}),
    ],
)
@pytest.mark.parametrize("samples", [32, 40])
def test_10_as_on_one_device(parallel, batch, options, samples):
    data = regression_data(samples)
    stock, start, expected = train(mlp, keras.Model, data, 16)
    parallel()
    ours, _, logs = train(mlp, Net, data, batch, **options)
    assert set(devices_of(ours)) == {4}
    assert iterations(ours) == iterations(stock) == 2 * -(-samples // 16)
    assert distance(ours, stock, start) < 1e-5
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5)
    wrong = {"accumulation_steps": 3, "micro_batch_size": 4}
    other, _, _ = train(mlp, Net, data, batch, **wrong)
    assert distance(other, stock, start) > 1e-2


@pytest.mark.parametrize("remainder", ["apply", "carry", "drop"])
def test_10_remainders(parallel, remainder):
    data = regression_data(40)
    options = {"accumulation_steps": 4, "remainder": remainder}
    one, start, _ = train(mlp, Net, data, 4, **options)
    parallel()
    four, _, _ = train(mlp, Net, data, 4, **options)
    assert iterations(four) == optimizer_steps(10, 4, 2, remainder)
    assert four.open_micro_batches == one.open_micro_batches
    assert distance(four, one, start) < 1e-5


@pytest.mark.parametrize(
    ("batch", "options"),
    [(4, {"accumulation_steps": 4}), (16, {"micro_batch_size": 4})],
)
def test_10_ragged_tokens_on_devices(parallel, batch, options):
    """Devices, and micro-batches, hold different numbers of tokens."""
    data = token_data(40)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def run(cls, batch, **options):
        sgd = keras.optimizers.SGD(0.1)
        return train(tagger, cls, data, batch, sgd, loss=loss, **options)

    stock, start, _ = run(keras.Model, 16)
    parallel()
    ours, _, _ = run(Net, batch, **options)
    wrong, _, _ = run(Net, batch, weighting="uniform", **options)
    assert distance(ours, stock, start) < 1e-5
    assert distance(wrong, stock, start) > 1e-3


def test_10_rows_of_the_log(parallel):
    parallel()
    log = EffectiveStepLogger()
    model, _, _ = train(
        mlp,
        Net,
        regression_data(40),
        8,
        accumulation_steps=2,
        micro_batch_size=4,
        callbacks=[log],
    )
    assert list(log.frame["samples"]) == [16, 16, 8] * 2
    assert list(log.frame["micro_batches"]) == [4, 8, 10, 14, 18, 20]
    assert model.optimizer_steps == 6


def test_10_the_optimizer(parallel):
    data = regression_data(40)[:2]
    stock, start, _ = train(mlp, keras.Model, data, 16)
    parallel()

    def ours(n):
        return train(
            mlp,
            keras.Model,
            data,
            4,
            AccumulationOptimizer(adam(), n),
            callbacks=[OptimizerRemainder()],
        )[0]

    right, wrong = ours(4), ours(3)
    assert iterations(right) == iterations(stock) == 6
    assert distance(right, stock, start) < 1e-5
    assert distance(wrong, stock, start) > 1e-2


def test_10_each_device_cuts_its_own_share(parallel):
    """Cutting a batch moves no sample from one device to another."""
    import jax

    from accumkit.backends.jax import pieces

    parallel()
    layout = keras.distribution.distribution().get_data_layout((16, 2))
    batch = np.arange(32, dtype="float32").reshape(16, 2)
    batch = jax.device_put(batch, layout.backend_layout)

    def cut(batch):
        full, last, _ = pieces.cut(batch, 8, keep_last=True)
        return full.stacked[0], last(())[1]

    compiled = jax.jit(cut).lower(batch).compile()
    first, last = compiled(batch)
    # The first two samples of each device, then its last two.
    np.testing.assert_array_equal(
        first[0, :, 0] / 2, [0, 1, 4, 5, 8, 9, 12, 13]
    )
    np.testing.assert_array_equal(last[:, 0] / 2, [2, 3, 6, 7, 10, 11, 14, 15])
    assert len(last.sharding.device_set) == 4
    text = compiled.as_text()
    for moving in ("all-gather", "all-to-all", "collective-permute"):
        assert moving not in text, text


@pytest.mark.parametrize("size", [4, 3, 12])
@pytest.mark.parametrize("samples", [32, 40])
def test_a_loss_over_the_batch_has_global_negatives(parallel, size, samples):
    """Each device has a share of each piece, and the loss sees them all."""

    def spread_out(y_true, y_pred):
        z = keras.ops.normalize(y_pred, axis=-1)
        logits = keras.ops.matmul(z, keras.ops.transpose(z)) / 0.3
        labels = keras.ops.roll(keras.ops.arange(logits.shape[0]), 1)
        return keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
        )

    def run(cls, **options):
        optimizer = keras.optimizers.SGD(0.1)
        return train(mlp, cls, data, 16, optimizer, loss=spread_out, **options)

    data = regression_data(samples)[:2]
    stock, start, expected = run(keras.Model)
    parallel()
    model, _, logs = run(Net, micro_batch_size=size, loss_over="batch")
    assert set(devices_of(model)) == {4}
    assert iterations(model) == iterations(stock) > 0
    assert distance(model, stock, start) < 5e-6
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=1e-5)
