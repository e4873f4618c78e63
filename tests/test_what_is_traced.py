"""What is traced must not be decided by what a later call changes."""

import keras
import numpy as np
import pytest
from models import (
    Stack,
    column,
    distance,
    fit,
    iterations,
    one_weight,
    ones,
    regression_data,
)

import accumkit

SGD = keras.optimizers.SGD
WAYS = {
    "across": {"accumulation_steps": 2},
    "within": {"micro_batch_size": 2},
}


def error(model, loss, batch_size=1, **options):
    """The loss that `fit` logs for a model that does not move."""
    model.compile(SGD(0.0), loss, **options)
    return fit(model, 1, 5, 6, batch_size=batch_size).history["loss"][0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("remainder", ["apply", "carry", "drop"])
def test_28_compiled_again_with_another_loss(way, remainder, mode):
    model = one_weight()
    size = 1 if way == "across" else 3
    options = {**WAYS[way], **mode, "remainder": remainder}
    values = [
        error(model, loss, size, **options) for loss in ("mse", "mae", "mse")
    ]
    # The trace of an equal function must not be found again.
    assert values == pytest.approx([62 / 3, 4.0, 62 / 3])


def test_28_somebody_holds_on_to_the_old_train_function(mode):
    model = one_weight()
    assert error(model, "mse", accumulation_steps=2, **mode) > 20
    kept = model.train_function
    assert error(model, "mae", accumulation_steps=2, **mode) == 4
    assert kept is not model.train_function


def test_28_compiled_again_with_clipping_and_metrics(mode):
    model, fresh = one_weight(), one_weight()
    model.compile(SGD(0.1), "mse", accumulation_steps=2, **mode)
    fit(model, 1, 5, 6)
    model.set_weights(fresh.get_weights())
    for each in (model, fresh):
        each.compile(
            SGD(0.1, clipnorm=0.5),
            "mse",
            metrics=["mae"],
            accumulation_steps=2,
            **mode,
        )
    logs = [fit(each, 1, 5, 6).history for each in (model, fresh)]
    assert logs[0] == logs[1]
    assert "mae" in logs[0]
    assert distance(model, fresh, [np.zeros((1, 1))]) == 0


def test_28_momentum_rescaled_after_an_earlier_fit():
    def train(earlier):
        keras.utils.set_random_seed(3)
        norm = keras.layers.BatchNormalization(momentum=0.9)
        model = Stack([keras.Input((5,)), norm, keras.layers.Dense(3)])
        model.compile(SGD(0.0), "mse", accumulation_steps=4)
        x, y, _ = regression_data(8)
        start = [w.copy() for w in model.get_weights()]
        if earlier:
            model.fit(x, y, batch_size=2, verbose=0, shuffle=False)
            model.set_weights(start)
        check = accumkit.callbacks.BatchNormalizationCheck("rescale_momentum")
        model.fit(
            x, y, batch_size=2, verbose=0, shuffle=False, callbacks=[check]
        )
        return np.asarray(norm.moving_mean), float(norm.momentum)

    first, second = train(False), train(True)
    np.testing.assert_allclose(first[0], second[0], rtol=1e-6)
    assert np.abs(first[0]).max() > 1e-3
    assert first[1] == second[1] == 0.9


class Heads:
    """Two heads, of which each batch uses one."""

    def __init__(self):
        super().__init__()
        options = {"use_bias": False, "kernel_initializer": "ones"}
        self.heads = {k: keras.layers.Dense(1, **options) for k in "ab"}
        for head in self.heads.values():
            head.build((None, 1))
        self.built = True

    def call(self, x):
        (name,) = x
        return self.heads[name](x[name])


class Tasks(accumkit.AccumulationMixin, Heads, keras.Model):
    pass


class PlainTasks(Heads, keras.Model):
    pass


def mean_prediction(y_true, y_pred):
    return keras.ops.mean(y_pred, axis=-1)


def heads(model):
    return [float(np.squeeze(w)) for w in model.get_weights()]


def take_turns(model, order):
    for name in order:
        x = np.ones((2, 1), "float32")
        model.train_on_batch({name: x}, x)


@pytest.mark.parametrize("how", ["mixin", "optimizer"])
@pytest.mark.parametrize("order", ["abba", "aabb", "abab", "aabbabba"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5}])
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_29_tasks_that_take_turns(how, order, options, mode):
    """A head that has no gradient in a window stays as it is, bit by bit."""
    n = 2
    optimizer = SGD(0.1, **options)
    if how == "mixin":
        model = Tasks()
        model.compile(optimizer, mean_prediction, accumulation_steps=n, **mode)
    else:
        model = PlainTasks()
        wrapper = accumkit.AccumulationOptimizer(optimizer, n)
        model.compile(wrapper, mean_prediction, **mode)
    take_turns(model, order)
    # By hand: the gradient is 1 for each micro-batch that uses a head.
    expected = {"a": 1.0, "b": 1.0}
    rate, decay = 0.1, options.get("weight_decay", 0.0)
    for start in range(0, len(order), n):
        window = order[start : start + n]
        for name, value in expected.items():
            used = window.count(name)
            if used or keras.config.backend() == "jax":
                # On JAX what is unused has a zero gradient, as in Keras.
                value -= value * decay * rate
                expected[name] = value - rate * used / n
    assert heads(model) == pytest.approx(list(expected.values()), abs=1e-6)
    steps = len(order) // n
    assert int(model.optimizer.iterations.numpy()) == steps


@pytest.mark.backend("tensorflow")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("remainder", ["carry", "apply"])
def test_29_in_fit_over_several_epochs(remainder):
    import tensorflow as tf

    model = Tasks()
    model.compile(
        SGD(0.1), mean_prediction, accumulation_steps=2, remainder=remainder
    )
    for name, epochs in (("a", 2), ("b", 2)):
        x = np.ones((6, 1), "float32")
        data = tf.data.Dataset.from_tensor_slices(({name: x}, x)).batch(2)
        model.fit(data, epochs=epochs, shuffle=False, verbose=0)
    if remainder == "carry":
        # Six batches a task: three windows of each.
        assert heads(model) == pytest.approx([0.7, 0.7])
        assert model.optimizer_steps == 6
    else:
        # Three batches an epoch: a window of two, then one of one.
        assert heads(model) == pytest.approx([0.6, 0.6])
        assert model.optimizer_steps == 8


class SetTrainable(keras.callbacks.Callback):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            # Not `self.model`, which on JAX brings the state back.
            self._model.layers[-1].trainable = self.value


def frozen_or_thawed(cls, batch_size, thaw, mode, **options):
    keras.utils.set_random_seed(3)
    model = cls(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    model.layers[-1].trainable = not thaw
    model.compile(SGD(0.2), "mse", **options, **mode)
    x, y, _ = regression_data(20)
    start = model.get_weights()
    model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[SetTrainable(thaw)],
    )
    return model, start


# On JAX Keras itself cannot do this; on torch not thaw.
@pytest.mark.backend("tensorflow", "torch")
@pytest.mark.parametrize("thaw", [False, True])
@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 4}, {"micro_batch_size": 2}]
)
def test_33_frozen_or_thawed_in_a_callback(thaw, options, mode):
    if thaw and (keras.config.backend() == "torch" or "run_eagerly" in mode):
        pytest.skip("Keras's optimizer does not know the variable there")
    size = 2 if "accumulation_steps" in options else 8
    model, start = frozen_or_thawed(Stack, size, thaw, mode, **options)
    stock, _ = frozen_or_thawed(keras.Sequential, 8, thaw, mode)
    assert distance(model, stock, start) < 3e-6
    assert iterations(model) == iterations(stock) == 9
    naive, _ = frozen_or_thawed(keras.Sequential, 2, thaw, mode)
    assert distance(naive, stock, start) > 0.05


@pytest.mark.backend("torch")
def test_33_what_was_frozen_leaves_nothing_behind():
    model = one_weight()
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    model.train_on_batch(ones(1), column(5))
    model.layers[-1].trainable = False
    variable = model.layers[-1].kernel
    assert variable.value.grad is not None
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    with pytest.warns(accumkit.AccumkitWarning, match="no trainable"):
        fit(model, 1, 2)
    model.layers[-1].trainable = True
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    fit(model, 1, 1)
    assert float(model.get_weights()[0].squeeze()) == pytest.approx(0.2)


@pytest.mark.backend("tensorflow")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_lora_after_a_fit_without_compiling():
    """As stock Keras: the compiled step goes on with what it was traced for."""

    def train(cls, batch_size, **options):
        keras.utils.set_random_seed(3)
        model = cls([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile(SGD(0.2), "mse", **options)
        x, y, _ = regression_data(20)
        start = model.get_weights()
        arguments = dict(batch_size=batch_size, shuffle=False, verbose=0)
        model.fit(x, y, **arguments)
        model.layers[-1].enable_lora(2)
        model.fit(x, y, **arguments)
        return np.asarray(model.layers[-1].bias), start

    ours, _ = train(Stack, 2, accumulation_steps=4)
    stock, start = train(keras.Sequential, 8)
    assert np.abs(stock - start[1]).max() > 1e-3
    np.testing.assert_allclose(ours, stock, rtol=1e-5)


def test_compiled_again_in_the_middle_of_a_window(mode):
    model = one_weight(Stack)
    model.compile(SGD(0.1), "mse", accumulation_steps=2, **mode)
    model.train_on_batch(ones(1), column(100))
    model.compile(SGD(0.1), "mse", accumulation_steps=2, **mode)
    fit(model, 1, 1)
    assert float(model.get_weights()[0].squeeze()) == pytest.approx(0.2)
