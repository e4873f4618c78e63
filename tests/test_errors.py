"""One clear message at the earliest moment (design section 9)."""

import keras
import numpy as np
import pytest
from models import Net, Stack, fit, mlp, one_weight, ones, regression_data

import accumkit


@pytest.mark.parametrize("name", ["accumulation_steps", "micro_batch_size"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (2.5, TypeError),
        (4.0, TypeError),
        ("4", TypeError),
        (True, TypeError),
        (np.bool_(True), TypeError),
        ([4], TypeError),
    ],
)
def test_26_bad_numbers(name, value, error):
    model = one_weight()
    with pytest.raises(error, match=rf"`{name}` must be an integer") as caught:
        model.compile("sgd", "mse", **{name: value})
    assert repr(value) in str(caught.value)
    assert not model.compiled


def test_26_good_numbers():
    model = one_weight()
    model.compile("sgd", "mse", accumulation_steps=np.int64(4))
    assert model.accumulation_steps == 4
    assert type(model.accumulation_steps) is int
    fit(model, 1, 2, 3, 4)
    assert model.optimizer_steps == 1


@pytest.mark.parametrize("value", [0, 2.5, True])
def test_setter_checks_too(value):
    model = one_weight()
    model.compile("sgd", "mse", accumulation_steps=4)
    with pytest.raises((ValueError, TypeError), match="`accumulation_steps`"):
        model.accumulation_steps = value
    assert model.accumulation_steps == 4
    with pytest.raises(ValueError, match="compiled model only"):
        one_weight().accumulation_steps = 4


@pytest.mark.parametrize("name", ["remainder", "weighting"])
@pytest.mark.parametrize("value", ["flush", None, 1])
def test_unknown_policies(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be one of"):
        one_weight().compile("sgd", "mse", **{name: value})


def test_16_optimizer_that_accumulates():
    def own():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    for optimizer in (
        own(),
        keras.optimizers.LossScaleOptimizer(own()),
        keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(own())),
    ):
        model = one_weight()
        with pytest.raises(
            ValueError,
            match=r"`accumulation_steps` must not.*accumulation_steps=4.*"
            r"gradient_accumulation_steps=2",
        ):
            model.compile(optimizer, "mse", accumulation_steps=4)
        assert not model.compiled
        with pytest.raises(ValueError, match="`micro_batch_size` must not"):
            model.compile(optimizer, "mse", micro_batch_size=4)
    model = one_weight()
    model.compile(own(), "mse")  # stock Keras, as it was asked for
    with pytest.raises(ValueError, match="must not be combined"):
        model.accumulation_steps = 2
    assert model.accumulation_steps == 1


def test_19_wrong_base_order():
    with pytest.raises(
        TypeError, match=r"class M\(AccumulationMixin, Functional|Model\)"
    ):

        class M(keras.Model, accumkit.AccumulationMixin):
            pass

    class Mine(keras.Sequential):
        pass

    with pytest.raises(TypeError, match=r"class M\(AccumulationMixin, Mine\)"):

        class M(Mine, accumkit.AccumulationMixin):
            pass


def test_a_train_step_in_the_way():
    class Ahead(Stack):
        def train_step(self, data):
            return {}

    class Behind(keras.Sequential):
        def train_step(self, data):
            return {}

    class Lost(accumkit.AccumulationMixin, Behind):
        pass

    class Fine(Stack):
        def train_step(self, *args):
            return super().train_step(*args)

    for cls, what in ((Ahead, "have no effect"), (Lost, "is lost")):
        model = one_weight(cls)
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=what):
            model.compile("sgd", "mse", accumulation_steps=2)
        with pytest.raises(
            ValueError,
            match=r"wrap \*each\* optimizer.*AccumulationOptimizer.*"
            r"`batch_size` what a micro-batch.*super\(\)",
        ):
            model.compile("sgd", "mse", micro_batch_size=2)
    model = one_weight(Fine)
    model.compile("sgd", "mse", accumulation_steps=2)
    fit(model, 1, 2)
    assert model.optimizer_steps == 1


def test_summed_and_averaged_outputs_do_not_mix():
    inputs = keras.Input((5,))
    outputs = [keras.layers.Dense(3, name=n)(inputs) for n in "ab"]
    model = Net(inputs, outputs)
    losses = [
        keras.losses.MeanSquaredError(reduction=r)
        for r in ("sum", "sum_over_batch_size")
    ]
    x, y, _ = regression_data(8)
    with pytest.raises(ValueError, match=r"`loss` must not mix"):
        model.compile("sgd", losses, accumulation_steps=2)
    with pytest.raises(ValueError, match=r"`loss` must not mix"):
        model.compile("sgd", ["mse", losses[0]], micro_batch_size=2)
    model.compile("sgd", losses[0], accumulation_steps=2)
    model.compile("sgd", losses, accumulation_steps=2, weighting="uniform")
    model.fit(x, [y, y], batch_size=4, verbose=0)
    assert model.optimizer_steps == 1


@pytest.mark.parametrize("fixed", [False, True])
def test_inputs_that_cannot_be_cut(fixed):
    """Found before the loop; in a graph with unknown lengths, by an op."""
    a, b = keras.Input((5,)), keras.Input(batch_shape=(1, 3))
    model = Net([a, b], keras.layers.Dense(3)(a) + b)
    model.compile("sgd", "mse", micro_batch_size=2, run_eagerly=fixed)
    x, y, _ = regression_data(4)

    def batches():
        while True:
            yield (x, y[:1]), y

    with pytest.raises(
        ValueError, match=r"^`micro_batch_size` needs inputs"
    ) as caught:
        model.fit(batches(), steps_per_epoch=1, shuffle=False, verbose=0)
    # The lengths themselves, also where a graph is traced without them.
    assert "None" not in str(caught.value)
    assert "4" in str(caught.value).split("Received:")[1]


def test_no_trainable_weights():
    model = mlp(Net)
    model.trainable = False
    x, y, _ = regression_data(4)
    for options in ({"accumulation_steps": 2}, {"micro_batch_size": 2}):
        model.compile("sgd", "mse", **options)
        with pytest.warns(accumkit.AccumkitWarning, match="no trainable"):
            model.fit(x, y, batch_size=2, verbose=0)


def test_added_losses_beside_tokens():
    """An activity regularizer counts samples, the masked loss tokens."""
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(5, 3, mask_zero=True)(inputs)
    x = keras.layers.Dense(2, activity_regularizer="l2")(x)
    model = Net(inputs, x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, accumulation_steps=2)
    ids = np.array([[1, 2, 0, 0], [3, 4, 1, 1]])
    with pytest.warns(accumkit.AccumkitWarning, match="activity regularizers"):
        model.fit(ids, ids % 2, batch_size=1, verbose=0)


def test_float8_scales_have_no_mean():
    model = mlp(Net)
    model.trainable_variables[0].overwrite_with_gradient = True
    model.compile("sgd", "mse", accumulation_steps=2)
    x, y, _ = regression_data(4)
    with pytest.raises(ValueError, match="float8"):
        model.fit(x, y, batch_size=2, verbose=0)


def test_warnings_have_one_base():
    assert issubclass(accumkit.AccumkitWarning, UserWarning)


def test_unbuilt_model_counts_nothing():
    model = Stack([keras.layers.Dense(1)])
    model.compile("sgd", "mse", accumulation_steps=2)
    assert (model.open_micro_batches, model.optimizer_steps) == (0, 0)
    assert model.apply_accumulated_gradients() == 0
    assert model.discard_accumulated_gradients() == 0
    fit(model, 1, 1)
    assert model.optimizer_steps == 1
    assert ones(1).shape == (1, 1)
