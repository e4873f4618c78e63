"""A user's method that keeps our train step out, or is kept out by it."""

import keras
import numpy as np
import pytest
from models import Stack, fit, one_weight, weight

import accumkit

SGD = keras.optimizers.SGD
BACKEND = keras.config.backend()
OPTIONS = [{"accumulation_steps": 2}, {"micro_batch_size": 2}]


def refused(model, match, **options):
    model.compile("sgd", "mse")  # as stock Keras
    with pytest.raises(ValueError, match=match):
        model.compile("sgd", "mse", **options)
    if "micro_batch_size" not in options:
        with pytest.raises(ValueError, match=match):
            model.accumulation_steps = 2


def step_of(model, *args):
    """A train function that runs `train_step`, on any backend."""
    if BACKEND == "jax":
        state, iterator = args
        return model.train_step(state, next(iterator))
    data = args[0]
    return model.train_step(data[0] if BACKEND == "torch" else next(data))


class MadeInFront(Stack):
    def make_train_function(self, force=False):
        self.train_function = lambda *args: step_of(self, *args)


class Reusing(Stack):
    def make_train_function(self, force=False):
        super().make_train_function(force)
        self.made = self.train_function


class MadeBehind(keras.Sequential):
    def make_train_function(self, force=False):
        self.train_function = lambda *args: step_of(self, *args)


class Mixed(accumkit.AccumulationMixin, MadeBehind):
    pass


@pytest.mark.parametrize("options", OPTIONS)
def test_a_train_function_of_ones_own(options):
    refused(one_weight(MadeInFront), "its own `make_train_function`", **options)
    for cls in (Reusing, Mixed):
        model = one_weight(cls)
        model.compile(SGD(0.1), "mse", **options)
        fit(model, 1, 2, batch_size=options.get("micro_batch_size", 1))
        assert weight(model) == pytest.approx(0.3)
        assert model.optimizer_steps == 1


class Aside(accumkit.AccumulationMixin, keras.Sequential):
    """Its train function leaves our train step out."""

    def make_train_function(self, force=False):
        super().make_train_function(force)
        stock = super(accumkit.AccumulationMixin, self).train_step
        step_of = globals()["step_of"]

        class Stock:
            train_step = staticmethod(stock)

        self.train_function = lambda *args: step_of(Stock, *args)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("how", ["train_step", "make_train_function"])
def test_what_can_be_seen_only_when_it_has_happened(how, options):
    """Set on the object, or hidden in a function: the epoch's end tells."""
    cls = Stack if how == "train_step" else Aside
    model = one_weight(cls)
    model.compile(SGD(0.1), "mse", **options)
    if how == "train_step":
        stock = super(accumkit.AccumulationMixin, model).train_step
        model.train_step = lambda *args: stock(*args)
    with pytest.raises(ValueError, match="training goes on without it"):
        fit(model, 1, 2)
    # On JAX an error while it is traced leaves a model without its values.
    model = one_weight(cls)
    model.compile(SGD(0.1), "mse")
    fit(model, 1, 2)  # stock Keras


def test_a_wrapper_on_the_object_is_fine():
    model = one_weight()
    ours = model.train_step
    model.train_step = lambda *args: ours(*args)
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    fit(model, 1, 2)
    fit(model, 1, 2)  # with the function traced before
    assert model.optimizer_steps == 2


def test_what_to_do_stands_first():
    class Gan(Stack):
        def train_step(self, data):
            return {}

    model = one_weight(Gan)
    for options in OPTIONS:
        with pytest.raises(ValueError, match="`Gan`") as caught:
            model.compile("sgd", "mse", **options)
        message = str(caught.value)
        first = message.index("wrap *each* optimizer that it uses")
        assert first < message.index("`super().train_step(...)`")
        assert first < message.index("override `compute_loss`")
        counts = "make `batch_size` what a micro-batch is to be" in message
        assert counts == ("micro_batch_size" in options)
    model.compile("sgd", "mse")
    log = accumkit.callbacks.EffectiveStepLogger()
    with pytest.raises(ValueError, match="`EffectiveStepLogger` needs") as e:
        fit(model, 1, callbacks=[log])
    assert "AccumulationOptimizer(" not in str(e.value)


class Chosen(Stack):
    """Trains what it chooses: the way of Keras 2, and of its train steps."""

    @property
    def trainable_weights(self):
        return super().trainable_weights[:2]


@pytest.mark.backend("tensorflow", "torch")
@pytest.mark.parametrize("options", OPTIONS)
def test_trainable_weights_of_ones_own(options, mode):
    """Stock Keras trains them on these backends, and nothing else."""

    def train(base, size, **kwargs):
        keras.utils.set_random_seed(1)
        model = base(
            [keras.Input((2,)), *(keras.layers.Dense(2) for _ in range(2))]
        )
        model.compile(SGD(0.1), "mse", **mode, **kwargs)
        start = model.get_weights()
        x = np.arange(8, dtype="float32").reshape(4, 2) / 8
        model.fit(x, x, batch_size=size, shuffle=False, verbose=0)
        return start, model.get_weights()

    class Stock(keras.Sequential):
        @property
        def trainable_weights(self):
            return super().trainable_weights[:2]

    size = 4 if "micro_batch_size" in options else 2
    start, ours = train(Chosen, size, **options)
    _, stock = train(Stock, 4)
    for a, b in zip(ours, stock, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.abs(ours[0] - start[0]).max() > 1e-3
    np.testing.assert_array_equal(ours[2], start[2])
    # One that trains everything is another model.
    _, naive = train(keras.Sequential, 4)
    assert np.abs(naive[2] - start[2]).max() > 1e-3
