"""`AccumulationOptimizer` saved, loaded and made from its config."""

import keras
import numpy as np
import pytest
from models import iterations, mlp, regression_data
from optimizers import plain

from accumkit import AccumulationOptimizer


@pytest.mark.parametrize("scaled", ["no", "inside", "outside"])
def test_files(scaled, tmp_path):
    optimizer = AccumulationOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.02))
        if scaled == "inside"
        else keras.optimizers.Adam(0.02),
        4,
        name="windows",
    )
    wrapped = optimizer
    if scaled == "outside":
        wrapped = keras.optimizers.LossScaleOptimizer(optimizer)
    x, y, _ = regression_data(16)
    model = plain(wrapped, "mse", mlp, keras.Model)
    model.fit(x, y, batch_size=2, verbose=0, shuffle=False)
    assert iterations(model) == 2
    model.fit(x[:2], y[:2], batch_size=2, verbose=0)
    assert optimizer.open_micro_batches == 1
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    again = loaded.optimizer
    if scaled == "outside":
        again = again.inner_optimizer
    assert type(again) is AccumulationOptimizer
    assert again.accumulation_steps == 4
    assert again.name == "windows"
    assert iterations(loaded) == 2
    # An open window is not part of a file.
    assert again.open_micro_batches == 0
    assert optimizer.discard_accumulated_gradients() == 1
    for one in (model, loaded):
        one.fit(x[:8], y[:8], batch_size=2, verbose=0, shuffle=False)
        assert iterations(one) == 3
    for old, new in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-6)


def test_a_file_holds_the_wrapped_optimizer_once(tmp_path):
    import h5py

    model = plain(AccumulationOptimizer("adam", 4), "mse", mlp, keras.Model)
    model.fit(*regression_data(8)[:2], batch_size=2, verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    stored = []
    with h5py.File(tmp_path / "a.weights.h5") as file:
        file["optimizer"].visititems(
            lambda name, item: (
                stored.append(item) if isinstance(item, h5py.Dataset) else None
            )
        )
        assert len(stored) == len(model.optimizer.inner_optimizer.variables)


def test_a_plain_optimizers_state_can_be_taken_over(tmp_path):
    x, y, _ = regression_data(16)
    stock = plain("adam", "mse", mlp, keras.Model)
    stock.fit(x, y, batch_size=4, verbose=0)
    store = {}
    stock.optimizer.save_own_variables(store)
    ours = plain(AccumulationOptimizer("adam", 4), "mse", mlp, keras.Model)
    ours.optimizer.build(ours.trainable_variables)
    ours.optimizer.load_own_variables(store)
    assert iterations(ours) == 4
    ours.optimizer.set_weights([v.numpy() for v in ours.optimizer.variables])
    assert iterations(ours) == 4


def test_compiled_again_and_again():
    """As tuners do: a new optimizer from a config, on the same model."""
    config = AccumulationOptimizer(
        keras.optimizers.Adam(0.02, clipnorm=1.0), 2, "uniform"
    ).get_config()
    model = mlp(keras.Model)
    start, ends = model.get_weights(), []
    for _ in range(3):
        model.set_weights(start)
        optimizer = AccumulationOptimizer.from_config(dict(config))
        assert optimizer.get_config() == config
        model.compile(optimizer, "mse")
        x, y, _ = regression_data(24)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert iterations(model) == 3
        ends.append(model.get_weights())
    for one in ends[1:]:
        for a, b in zip(ends[0], one, strict=True):
            np.testing.assert_array_equal(a, b)


def test_serialized_forms():
    optimizer = AccumulationOptimizer("adam", 3)
    config = keras.optimizers.serialize(optimizer)
    again = keras.optimizers.get(config)
    assert type(again) is AccumulationOptimizer
    assert again.accumulation_steps == 3
    given = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    inner = AccumulationOptimizer(given, 2).inner_optimizer
    assert float(inner.learning_rate.numpy()) == 0.5
    assert given["class_name"] == "SGD"
