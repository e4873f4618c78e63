"""Classes that bring a `fit` or a `compile` of their own."""

import keras
import numpy as np
import pytest
from models import (
    Stack,
    column,
    distance,
    fit,
    fit_in_order,
    one_weight,
    ones,
    regression_data,
    weight,
)

import accumkit

SGD = keras.optimizers.SGD


class Watcher(keras.callbacks.Callback):
    """Notes how many micro-batches are open when an epoch has ended."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((self.model.optimizer_steps, weight(self.model)))


class Noting(keras.Model):
    """Notes what its `fit` and its `compile` were given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.given = {}

    def fit(self, *args, **kwargs):
        self.given["fit"] = (args, kwargs)
        return super().fit(*args, **kwargs)

    def compile(self, *args, **kwargs):
        self.given["compile"] = (args, kwargs)
        super().compile(*args, **kwargs)


class Options(accumkit.AccumulationMixin, Noting):
    pass


def functional(cls, **kwargs):
    inputs = keras.Input((1,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return cls(inputs, layer(inputs), **kwargs)


def test_what_was_given_is_handed_on_as_it_was_given():
    model = functional(Options)
    model.compile(accumulation_steps=2)
    assert model.given["compile"] == ((), {})
    sgd = SGD(0.1)
    model.compile(sgd, loss="mse", accumulation_steps=2)
    assert model.given["compile"] == ((sgd,), {"loss": "mse"})
    x, y = ones(2), column(1, 2)
    model.fit(x, y=y, verbose=0)
    args, kwargs = model.given["fit"]
    assert args[0] is x
    assert len(args) == 1
    assert kwargs.pop("y") is y
    assert len(kwargs.pop("callbacks")) == 1
    assert kwargs == {"verbose": 0}


@pytest.mark.parametrize("place", ["position", "keyword", "none"])
@pytest.mark.parametrize("cls", [Stack, Options])
def test_callbacks_are_found_wherever_they_are(cls, place):
    """Ours stands in front: theirs sees the remainder's step."""
    model = one_weight(Stack) if cls is Stack else functional(cls)
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    watcher = Watcher()
    arguments = [ones(3), column(1, 2, 3), 1, 2, 0]
    if place == "position":
        model.fit(*arguments, watcher, 0.0, None, False)
    elif place == "keyword":
        model.fit(*arguments, callbacks=[watcher], shuffle=False)
    else:
        model.fit(*arguments, shuffle=False)
    if place != "none":
        assert [steps for steps, _ in watcher.seen] == [2, 4]
        assert watcher.seen[-1][1] == weight(model)
    assert (model.optimizer_steps, model.open_micro_batches) == (4, 0)


class Keywords(keras.Sequential):
    """Like the tasks of keras_hub: another order, the rest by keyword."""

    def fit(self, x, y=None, batch_size=None, sample_weight=None, **kwargs):
        return super().fit(
            x, y, batch_size=batch_size, sample_weight=sample_weight, **kwargs
        )


class Data(keras.Sequential):
    """One argument of its own and Keras's for `callbacks` only."""

    def fit(self, data, callbacks=(), *, passes=1):
        x, y = data
        return super().fit(
            x,
            y,
            batch_size=1,
            epochs=passes,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )


class Wrapped(keras.Sequential):
    """Passes on what it gets behind an argument of its own."""

    def fit(self, x, *args, **kwargs):
        return super().fit(x, *args, **kwargs)


@pytest.mark.parametrize("base", [Keywords, Data, Wrapped])
@pytest.mark.parametrize("given", [True, False])
def test_a_fit_with_another_signature(base, given):
    class Mixed(accumkit.AccumulationMixin, base):
        pass

    model = one_weight(Mixed)
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    watcher = Watcher()
    x, y, weights = ones(3), column(1, 2, 3), np.array([1.0, 2.0, 1.0])
    callbacks = {"callbacks": [watcher]} if given else {}
    if base is Data:
        model.fit((x, y), *callbacks.values(), passes=2)
    elif base is Keywords:
        model.fit(
            x, y, 1, weights, epochs=2, shuffle=False, verbose=0, **callbacks
        )
    else:
        # As Keras's sixth, behind the argument that the class names.
        model.fit(x, y, 1, 2, 0, *callbacks.values(), shuffle=False)
    if given:
        assert [steps for steps, _ in watcher.seen] == [2, 4]
    assert (model.optimizer_steps, model.open_micro_batches) == (4, 0)
    large = one_weight(keras.Sequential)
    large.compile(SGD(0.1), "mse")
    large.fit(
        x,
        y,
        sample_weight=weights if base is Keywords else None,
        batch_size=2,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    assert weight(model) == pytest.approx(weight(large), abs=1e-6)
    assert weight(model) > 0.1


class Closed(keras.Sequential):
    """Takes no callbacks."""

    def fit(self, x, y, epochs=1):
        return super().fit(
            x, y, epochs=epochs, batch_size=1, verbose=0, shuffle=False
        )


class Silent(keras.Sequential):
    """Takes callbacks, and forgets them."""

    def fit(self, x, y, epochs=1, callbacks=None):
        return super().fit(
            x, y, epochs=epochs, batch_size=1, verbose=0, shuffle=False
        )


@pytest.mark.parametrize("base", [Closed, Silent])
def test_a_fit_that_runs_no_callbacks(base):
    class Mixed(accumkit.AccumulationMixin, base):
        pass

    model = one_weight(Mixed)
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    with pytest.warns(accumkit.AccumkitWarning, match="`fit` of class `Mixed`"):
        model.fit(ones(3), column(1, 2, 3))
    assert model.open_micro_batches == 1
    model.fit(ones(3), column(1, 2, 3))  # once a `compile`
    for options in (
        {"accumulation_steps": 2, "remainder": "carry"},
        {"micro_batch_size": 2},
        {},
    ):
        model.compile(SGD(0.1), "mse", **options)
        model.fit(ones(3), column(1, 2, 3))


class InFront(Stack):
    """A `fit` and a `compile` in front of the mixin."""

    def fit(self, x, y=None, **kwargs):
        return super().fit(x, y, shuffle=False, verbose=0, **kwargs)

    def compile(self, optimizer, temperature=3.0, **kwargs):
        super().compile(optimizer, loss="mse", **kwargs)
        self.temperature = temperature


def test_a_class_in_front():
    model = one_weight(InFront)
    model.compile(SGD(0.1), 2.0, accumulation_steps=2)
    model.fit(ones(3), column(1, 2, 3), batch_size=1)
    assert model.temperature == 2.0
    assert (model.optimizer_steps, model.open_micro_batches) == (2, 0)
    assert weight(model) == pytest.approx(0.3 + 0.2 * (3 - 0.3))


def test_the_batch_size_of_a_fit_of_ones_own():
    """`BatchNormalizationCheck` counts pieces by it."""

    class Mixed(accumkit.AccumulationMixin, Keywords):
        pass

    model = Mixed(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    model.compile("sgd", "mse", micro_batch_size=4)
    x, y, weights = regression_data(16)
    for arguments, pieces in (
        ((x, y, 8, weights), 2),
        ((x, y, 12), 3),
        ((x, y), 8),  # Keras's 32
    ):
        check = accumkit.callbacks.BatchNormalizationCheck()
        with pytest.warns(accumkit.AccumkitWarning, match=f"1/{pieces} of"):
            model.fit(*arguments, callbacks=[check], verbose=0)


# A compile of one's own.


class Distiller(keras.Sequential):
    """A temperature where Keras has its loss, and defaults."""

    def compile(self, optimizer="auto", temperature=3.0, loss="auto", **kw):
        if optimizer == "auto":
            optimizer = SGD(0.1)
        self.temperature = temperature
        super().compile(optimizer, loss="mse" if loss == "auto" else loss, **kw)


class Distilled(accumkit.AccumulationMixin, Distiller):
    pass


def test_the_defaults_are_those_of_the_class(mode):
    model = one_weight(Distilled)
    model.compile(accumulation_steps=2, **mode)
    assert isinstance(model.optimizer, SGD)
    assert model.temperature == 3.0
    model.compile(SGD(0.1), 5.0, accumulation_steps=2, **mode)
    assert model.temperature == 5.0
    fit(model, 1, 2)
    assert weight(model) == pytest.approx(0.3)


def test_what_a_class_chooses_is_checked_too():
    """And the model stays as it was."""

    class Choosing(keras.Sequential):
        def compile(self, bad=(), **kwargs):
            steps = 2 if "optimizer" in bad else None
            loss = keras.losses.MeanSquaredError(
                reduction="sum" if "loss" in bad else "sum_over_batch_size"
            )
            super().compile(
                SGD(0.1, gradient_accumulation_steps=steps),
                [loss, "mse"] if "loss" in bad else "mse",
                **kwargs,
            )

    class Mixed(accumkit.AccumulationMixin, Choosing):
        pass

    model = one_weight(Mixed)
    cases = (("optimizer",), "the two would multiply"), (("loss",), "not mix")
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            model.compile(bad, accumulation_steps=2)
        assert not model.compiled
    model.compile(accumulation_steps=2)
    optimizer, metrics = model.optimizer, model.metrics
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            model.compile(bad, accumulation_steps=4)
        assert model.compiled
        assert model.optimizer is optimizer
        assert model.metrics == metrics
    fit(model, 1, 2)
    assert weight(model) == pytest.approx(0.3)
    assert model.accumulation_steps == 2
    model.compile(("optimizer",))  # without options it is stock Keras


def test_loss_and_optimizer_by_position_and_by_name():
    summed = keras.losses.MeanSquaredError(reduction="sum")
    accumulating = SGD(0.1, gradient_accumulation_steps=2)
    for cls in (Stack, Distilled):
        model = one_weight(cls)
        with pytest.raises(ValueError, match="the two would multiply"):
            model.compile(accumulating, accumulation_steps=2)
        with pytest.raises(ValueError, match="the two would multiply"):
            model.compile(optimizer=accumulating, accumulation_steps=2)
        with pytest.raises(ValueError, match="not mix"):
            model.compile("sgd", loss=["mse", summed], accumulation_steps=2)
        assert not model.compiled
    with pytest.raises(ValueError, match="not mix"):
        one_weight().compile("sgd", ["mse", summed], accumulation_steps=2)


@pytest.mark.backend("torch")
def test_torch_compile_is_found_by_position():
    model = one_weight()
    with pytest.raises(ValueError, match="`jit_compile=True` does not go"):
        model.compile(
            "sgd", "mse", None, None, None, False, 1, True, accumulation_steps=2
        )
    assert not model.compiled


@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 4}, {"micro_batch_size": 2}]
)
def test_a_distiller_is_the_large_batch(options, mode):
    """A teacher and a student, in one class with all of it."""

    class Student(keras.Model):
        def __init__(self):
            super().__init__()
            self.student = keras.layers.Dense(3)
            self.teacher = keras.layers.Dense(3, trainable=False)

        def build(self, shape):
            self.student.build(shape)
            self.teacher.build(shape)

        def compile(self, optimizer, metrics=None, alpha=0.1, **kwargs):
            super().compile(optimizer, metrics=metrics, **kwargs)
            self.alpha = alpha

        def compute_loss(
            self, x, y, y_pred, sample_weight=None, allow_empty=False
        ):
            near = keras.ops.mean(keras.ops.square(y - y_pred))
            far = keras.ops.mean(keras.ops.square(self.teacher(x) - y_pred))
            return self.alpha * near + (1 - self.alpha) * far

        def call(self, x):
            return self.student(x)

        def fit(self, x=None, y=None, **kwargs):
            return super().fit(x=x, y=y, **kwargs)

    class Mixed(accumkit.AccumulationMixin, Student):
        pass

    def run(cls, batch_size, **kwargs):
        keras.utils.set_random_seed(3)
        model = cls()
        model.build((None, 5))
        model.compile(SGD(0.3), ["mae"], 0.3, **mode, **kwargs)
        start, _ = fit_in_order(model, (x, y), batch_size)
        return model, start

    x, y, _ = regression_data(22)  # 8, 8, 6
    large, start = run(Student, 8)
    ours, _ = run(Mixed, 2 if "accumulation_steps" in options else 8, **options)
    small, _ = run(Student, 2)
    assert ours.alpha == 0.3
    assert distance(ours, large, start) < 1e-5
    assert distance(small, large, start) > 1e-2
