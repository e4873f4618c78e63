"""What `AccumulationOptimizer` refuses, and how it says so."""

import keras
import pytest
from models import one_weight
from optimizers import SGD

from accumkit import AccumulationOptimizer

BACKEND = keras.config.backend()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("sgd", 0), ValueError, r"`accumulation_steps`.*>= 1.*=0"),
        (("sgd", 2.0), TypeError, r"`accumulation_steps`.*integer"),
        (("sgd", True), TypeError, r"`accumulation_steps`.*integer"),
        (("sgd", 2, "mean"), ValueError, r"`weighting` must be one of"),
        ((None, 2), ValueError, r"`optimizer`.*None"),
        (("no such", 2), ValueError, "no such"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        AccumulationOptimizer(*arguments)


def test_nothing_accumulates_inside():
    accumulating = SGD(0.1, gradient_accumulation_steps=2)
    for inner in (
        accumulating,
        keras.optimizers.LossScaleOptimizer(accumulating),
        AccumulationOptimizer("sgd", 2),
        AccumulationOptimizer("sgd", 1),
        keras.optimizers.LossScaleOptimizer(AccumulationOptimizer("sgd", 1)),
    ):
        with pytest.raises(ValueError, match="the two would multiply"):
            AccumulationOptimizer(inner, 4)


def test_the_mixin_refuses_it():
    with pytest.raises(ValueError, match="the two would multiply"):
        one_weight().compile(
            AccumulationOptimizer("sgd", 2), "mse", accumulation_steps=2
        )


def test_bad_gradients():
    variable = keras.Variable([1.0])
    optimizer = AccumulationOptimizer("sgd", 2)
    one = keras.ops.ones((1,))
    assert optimizer.apply([]) is None
    with pytest.raises(ValueError, match="not built"):
        optimizer.apply([one])
    optimizer.build([variable])
    with pytest.raises(ValueError, match="1 of them unknown"):
        optimizer.apply([one], [keras.Variable([1.0])])
    with pytest.raises(ValueError, match="None for all"):
        optimizer.apply([None])
    with pytest.raises(ValueError, match="2 gradients for 1"):
        optimizer.apply([one, one])
    if BACKEND == "jax":
        with pytest.raises(ValueError, match="`optimizer_variables` must hold"):
            optimizer.stateless_apply([], [one], [one])
    else:
        with pytest.raises(ValueError, match="`stateless_apply` is not"):
            optimizer.stateless_apply(optimizer.variables, [one], [one])


def test_float8_is_refused():
    variable = keras.Variable([1.0])
    variable.overwrite_with_gradient = True
    with pytest.raises(ValueError, match="float8"):
        AccumulationOptimizer("sgd", 2).build([variable])
