"""Construction, saving, loading, cloning (cases 8, 9, 18)."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from models import (
    Called,
    Net,
    Stack,
    fit,
    iterations,
    mlp,
    one_weight,
    ones,
    regression_data,
    weight,
)

import accumkit


@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 2}, {"micro_batch_size": 2}]
)
def test_08_accumulators_are_no_weights(tmp_path, options):
    x, y, _ = regression_data(8)
    ours, stock = mlp(Net), mlp(keras.Model)
    ours.compile("adam", "mse", **options)
    stock.compile("adam", "mse")
    for model in (ours, stock):
        model.fit(x, y, batch_size=4, verbose=0)
    assert ours.count_params() == stock.count_params()
    assert [w.shape for w in ours.get_weights()] == [
        w.shape for w in stock.get_weights()
    ]
    assert len(ours.weights) == len(stock.weights)
    assert len(ours.non_trainable_weights) == 0
    assert len(ours.optimizer.variables) == len(stock.optimizer.variables)
    summaries = []
    for model in (ours, stock):
        lines = []
        model.summary(print_fn=lambda text, lines=lines: lines.append(text))
        summaries.append("".join(lines).split("\n")[-8:])
    assert [s for s in summaries[0] if "params" in s] == [
        s for s in summaries[1] if "params" in s
    ]
    # Files of either load into the other; a warning would be an error here.
    paths = [tmp_path / "ours.weights.h5", tmp_path / "stock.weights.h5"]
    ours.save_weights(paths[0])
    stock.save_weights(paths[1])
    w = [model.get_weights() for model in (ours, stock)]
    ours.load_weights(paths[1])
    stock.load_weights(paths[0])
    for a, b in zip(
        ours.get_weights() + stock.get_weights(), w[1] + w[0], strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_09_construction_styles():
    bases = accumkit.AccumulationMixin.__bases__

    class Sub(Net):
        pass

    def functional(cls, **kwargs):
        inputs = keras.Input((1,))
        outputs = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros"
        )(inputs)
        if kwargs.get("keywords"):
            return cls(inputs=inputs, outputs=outputs)
        return cls(inputs, outputs)

    models = [
        functional(Net),
        functional(Net, keywords=True),
        functional(Net),
        functional(Sub),
        functional(Sub, keywords=True),
        one_weight(Stack),
        Called(),
        Stack(
            [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        ),
    ]
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=4)
        fit(model, 1, 2, 3, 4)
        assert weight(model) == pytest.approx(0.5)
        assert model.optimizer_steps == iterations(model) == 1
        assert model.accumulation_steps == 4
    assert accumkit.AccumulationMixin.__bases__ == bases == (object,)
    plain = functional(keras.Model)
    assert not isinstance(plain, accumkit.AccumulationMixin)
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    fit(plain, 1, 2, 3, 4, batch_size=4)
    assert weight(plain) == pytest.approx(0.5)


def functional_weight():
    inputs = keras.Input((1,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return Net(inputs, layer(inputs))


@pytest.mark.parametrize(
    "build", [functional_weight, one_weight, Called], ids=lambda f: f.__name__
)
def test_18_save_and_load_in_a_fresh_process(tmp_path, build):
    model = build()
    model.compile(
        keras.optimizers.SGD(0.1),
        "mse",
        accumulation_steps=4,
        remainder="drop",
        weighting="uniform",
    )
    fit(model, 1, 2, 3, 4, 9)  # one step; the fifth is dropped
    path = tmp_path / "model.keras"
    model.train_on_batch(ones(1), ones(1))  # an open window is not saved
    model.save(path)
    code = f"""
import sys
sys.path.insert(0, {str(sys.path[0])!r})
sys.path.insert(0, {__file__.rsplit("/", 1)[0]!r})
import keras, numpy as np, models
model = keras.models.load_model({str(path)!r})
print(type(model).__name__, model.accumulation_steps, model.optimizer_steps,
      model._accumulation.config(), model.open_micro_batches)
models.fit(model, *[2] * 8)
print(model.optimizer_steps, models.weight(model))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.strip().splitlines()[-2:]
    assert first == (
        f"{type(model).__name__} 4 1 {model._accumulation.config()} 0"
    )
    steps, w = second.split()
    assert steps == "3"
    assert float(w) == pytest.approx(2 - 1.5 * 0.8**2, abs=1e-6)


def test_18_clones():
    model = functional_weight()
    model.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=4)
    clone = keras.models.clone_model(model)
    assert type(clone) is Net
    assert clone.accumulation_steps == 4
    fit(clone, 1, 2, 3, 4)
    assert weight(clone) == pytest.approx(0.5)

    # Keras clones a Sequential subclass into a plain Sequential.
    stack = one_weight()
    stack.compile(keras.optimizers.SGD(0.1), "mse", accumulation_steps=4)
    with pytest.warns(accumkit.AccumkitWarning, match="accumulation_steps=4"):
        clone = keras.models.clone_model(stack)
    assert type(clone) is keras.Sequential
    fit(clone, 1, 2, 3, 4, batch_size=4)
    assert weight(clone) == pytest.approx(0.5)


def test_plain_compile_config_loads():
    stock = one_weight(keras.Sequential)
    stock.compile(keras.optimizers.SGD(0.1), "mse")
    model = one_weight()
    model.compile_from_config(stock.get_compile_config())
    assert model.accumulation_steps == 1
    assert model.optimizer.built
