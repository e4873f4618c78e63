"""The callback that deals with an open window at the end of an epoch."""

import keras
import pytest
from models import (
    fit,
    iterations,
    ones,
    weight,
)
from optimizers import SGD, plain

from accumkit import AccumulationOptimizer
from accumkit.callbacks.accumulation_optimizer_remainder import (
    OptimizerRemainder,
)


def test_remainder_before_validation():
    seen = []
    read = keras.callbacks.LambdaCallback(
        on_test_begin=lambda logs: seen.append(weight(model))
    )
    model = plain(AccumulationOptimizer(SGD(0.1), 4))
    fit(
        model,
        *[1, 1, 1],
        epochs=2,
        validation_data=(ones(1), ones(1)),
        callbacks=[OptimizerRemainder(), read],
    )
    assert seen == pytest.approx([0.2, 0.36], rel=1e-6)


def test_evaluations_of_the_user_change_nothing():
    model = plain(AccumulationOptimizer(SGD(0.1), 4))
    remainder = OptimizerRemainder("carry")
    fit(model, 1, callbacks=[remainder])
    for callback in (remainder, OptimizerRemainder()):
        model.evaluate(ones(1), ones(1), verbose=0, callbacks=[callback])
    assert model.optimizer.open_micro_batches == 1
    # A new `fit` starts with an empty window.
    fit(model, 1, 1, 1, callbacks=[OptimizerRemainder("drop")])
    assert iterations(model) == 0
    assert model.optimizer.open_micro_batches == 0


def test_callback_needs_the_optimizer():
    with pytest.raises(ValueError, match="Received: the optimizer SGD"):
        fit(plain(SGD(0.1)), 1, callbacks=[OptimizerRemainder()])
    with pytest.raises(ValueError, match="`remainder` must be one of"):
        OptimizerRemainder("keep")
