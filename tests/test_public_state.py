"""What tools read from a model is what they read from the plain one."""

import keras
import numpy as np
import pytest
from models import (
    Net,
    column,
    distance,
    fit,
    mlp,
    one_weight,
    ones,
    regression_data,
    weight,
)

SGD = keras.optimizers.SGD
N = {"accumulation_steps": 4}


def leaves(tree):
    """Paths and shapes of a nested dict."""
    if not isinstance(tree, dict):
        return np.shape(tree)
    return {key: leaves(value) for key, value in sorted(tree.items())}


def public(model):
    return {
        "variables": [v.path for v in model.variables],
        "weights": [v.path for v in model.weights],
        "others": [v.path for v in model.non_trainable_variables],
        "optimizer": [v.path for v in model.optimizer.variables],
        "tree": leaves(model.get_state_tree()),
    }


class Reads(keras.callbacks.Callback):
    """Reads in the middle of an epoch, and of a window."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.seen = public(self.model)


def trained(cls, **options):
    keras.utils.clear_session()  # the same names again
    model = mlp(cls)
    model.compile("adam", "mse", metrics=["mae"], **options)
    x, y, _ = regression_data(16)
    reads = Reads()
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[reads])
    return model, reads.seen, public(model)


@pytest.mark.parametrize("options", [N, {"micro_batch_size": 1}])
def test_32_variables_and_state_tree(options):
    _, *expected = trained(keras.Model)
    model, *found = trained(Net, **options)
    rename = [
        str(f).replace("net", "functional").replace("Net", "Functional")
        for f in found
    ]
    assert rename == [str(e) for e in expected]
    # And back: what was read out can be put in.
    model.set_state_tree(model.get_state_tree())


@pytest.mark.parametrize("options", [N, {"micro_batch_size": 1}])
def test_32_a_model_around_the_model(options):
    inner, *_ = trained(Net, **options)
    x, y, _ = regression_data(16)
    inputs = keras.Input((5,))
    outer = keras.Model(inputs, keras.layers.Dense(3)(inner(inputs)))
    assert len(outer.variables) == len(outer.weights)
    assert len(outer.weights) == len(inner.weights) + 2
    outer.compile("sgd", "mse")
    start = [w.copy() for w in inner.get_weights()]
    outer.fit(x, y, batch_size=4, verbose=0)
    assert any(
        np.abs(a - b).max() > 0
        for a, b in zip(inner.get_weights(), start, strict=True)
    )


@pytest.mark.backend("tensorflow", "jax")
@pytest.mark.filterwarnings("ignore")  # TensorFlow's converter, many kinds
def test_32_exported_models_hold_no_window(tmp_path):
    tf = pytest.importorskip("tensorflow")
    counts = []
    for cls, options in ((keras.Model, {}), (Net, N)):
        model, *_ = trained(cls, **options)
        path = str(tmp_path / cls.__name__)
        model.export(path, verbose=False)
        loaded = tf.saved_model.load(path)
        counts.append(len(loaded.variables))
        x = regression_data(16)[0]
        np.testing.assert_allclose(
            loaded.serve(x), model.predict(x, verbose=0), rtol=1e-5
        )
    assert counts[0] == counts[1]


@pytest.mark.backend("jax")
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_32_orbax_checkpoints(tmp_path):
    """CI has the package, and fails where it is missing."""
    pytest.importorskip("orbax.checkpoint")
    if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
        pytest.skip("this Keras has no OrbaxCheckpoint")
    x, y, _ = regression_data(16)
    arguments = {"batch_size": 2, "shuffle": False, "verbose": 0}
    model = mlp(Net)
    model.compile(SGD(0.1, momentum=0.9), "mse", **N)
    checkpoint = keras.callbacks.OrbaxCheckpoint(
        str(tmp_path / "orbax"), save_freq="epoch"
    )
    model.fit(x, y, epochs=2, callbacks=[checkpoint], **arguments)
    expected = model.get_weights()
    model.fit(x, y, epochs=1, **arguments)
    further = model.get_weights()

    keras.utils.clear_session()  # the state tree goes by names
    again = mlp(Net, seed=9)
    again.compile(SGD(0.1, momentum=0.9), "mse", **N)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(str(tmp_path / "orbax"))
    for a, b in zip(again.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.optimizer_steps == 4
    again.fit(x, y, epochs=1, **arguments)
    for a, b in zip(again.get_weights(), further, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:No window can be filled")
def test_32_evaluating_in_the_middle_of_a_window():
    """An evaluation reads the state without the window, and leaves it."""
    model = one_weight()
    model.compile(SGD(0.1), "mse", remainder="carry", **N)

    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(ones(1), column(1), verbose=0)
            self.model.predict(ones(1), verbose=0)

    fit(model, 1, 2, 3, callbacks=[Evaluates()])
    assert model.open_micro_batches == 3
    fit(model, 4, callbacks=[Evaluates()])
    assert weight(model) == pytest.approx(0.5)


@pytest.mark.backend("jax")
@pytest.mark.parametrize("eagerly", [False, True])
def test_19_weights_can_be_loaded_after_an_error_in_a_step(tmp_path, eagerly):
    """Out of memory, say: Keras gave the buffers away before it failed."""
    model = one_weight()
    model.compile(SGD(0.1), "mse", run_eagerly=eagerly, **N)
    fit(model, 1, 2, 3)
    model.save_weights(tmp_path / "w.weights.h5")
    start = weight(model)
    step = model.train_function

    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:

                def failing(state, iterator):
                    for value in [*state[0], *state[1], *state[2]]:
                        value.delete()
                    raise RuntimeError("RESOURCE_EXHAUSTED")

                self._model.train_function = failing

    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        fit(model, 1, 2, 3, 4, callbacks=[Fails()])
    model.load_weights(tmp_path / "w.weights.h5")
    model.train_function = step
    assert (weight(model), model.open_micro_batches) == (start, 0)
    model.optimizer.iterations.assign(1)
    model.optimizer.learning_rate = 0.1
    fit(model, *[start + 1] * 4)
    assert weight(model) == pytest.approx(start + 0.2)


@pytest.mark.backend("torch")
def test_16_train_step_before_any_fit():
    for options in ({}, N, {"micro_batch_size": 2}):
        model = mlp(Net)
        model.compile(SGD(0.1), "mse", metrics=["mae"], **options)
        x, y, _ = regression_data(4)
        logs = model.train_step((x, y))
        assert set(logs) == {"loss", "mae"}, options


@pytest.mark.backend("tensorflow", "jax")
@pytest.mark.parametrize(
    "options",
    [{"micro_batch_size": 3}, {"micro_batch_size": 4}, N],
    ids=["ragged", "even", "across"],
)
def test_35_sparse_input(options, mode):
    """Scipy's matrices, cut into pieces."""
    sparse = pytest.importorskip("scipy.sparse")
    if mode.get("jit_compile") and keras.config.backend() == "tensorflow":
        pytest.skip("XLA on TensorFlow takes no sparse tensors")
    rng = np.random.default_rng(0)
    dense = (rng.uniform(size=(16, 6)) < 0.3) * rng.normal(size=(16, 6))
    x = sparse.csr_matrix(dense.astype("float32"))
    y = rng.normal(size=(16, 2)).astype("float32")

    def train(cls, batch_size, **kwargs):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,), sparse=True)
        model = cls(inputs, keras.layers.Dense(2)(inputs))
        model.compile(SGD(0.1), "mse", **kwargs)
        start = model.get_weights()
        model.fit(
            x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
        )
        return model, start

    stock, start = train(keras.Model, 16)
    size = 4 if "accumulation_steps" in options else 16
    ours, _ = train(Net, size, **options, **mode)
    assert distance(ours, stock, start) < 3e-6
    naive, _ = train(keras.Model, 4)
    assert distance(naive, stock, start) > 0.01


def test_state_can_be_asked_for_on_any_backend():
    """Keras 3.16 calls it wherever a model has it; stock ones may not."""
    model = mlp(Net)
    model.compile("sgd", "mse", accumulation_steps=2)
    model.state_sync()
