"""`AccumulationOptimizer` in loops of one's own."""

import keras
import numpy as np
import pytest
from models import distance, mlp, regression_data
from optimizers import SGD
from test_equivalence import OPTIMIZERS, TOLERANCE

from accumkit import AccumulationOptimizer

BACKEND = keras.config.backend()


def loss_of(model, x, y):
    prediction = model(x, training=True)
    difference = keras.ops.convert_to_tensor(y) - prediction
    return keras.ops.mean(keras.ops.square(difference)) + sum(model.losses)


def loop(model, optimizer, batches, compiled):
    """A training loop of one's own, in the way of each backend."""
    variables = model.trainable_variables
    if BACKEND == "torch":
        for x, y in batches:
            model.zero_grad()
            optimizer.scale_loss(loss_of(model, x, y)).backward()
            optimizer.apply([v.value.grad for v in variables], variables)
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(loss_of(model, x, y))
            optimizer.apply(tape.gradient(loss, variables), variables)

        if compiled:
            step = tf.function(step)
        for x, y in batches:
            step(tf.constant(x), tf.constant(y))
    else:
        import jax

        optimizer.build(variables)

        def loss(trainable, x, y):
            mapping = zip(variables, trainable, strict=True)
            with keras.StatelessScope(list(mapping), collect_losses=True):
                return loss_of(model, x, y)

        def step(trainable, state, x, y):
            grads = jax.grad(loss)(trainable, x, y)
            return optimizer.stateless_apply(state, grads, trainable)

        if compiled:
            step = jax.jit(step)
        trainable = [v.value for v in variables]
        state = [v.value for v in optimizer.variables]
        for x, y in batches:
            trainable, state = step(trainable, state, x, y)
        for variable, value in zip(
            [*variables, *optimizer.variables],
            [*trainable, *state],
            strict=True,
        ):
            variable.assign(value)


@pytest.mark.parametrize("compiled", [False, True])
def test_own_loop(compiled):
    x, y, _ = regression_data(48)

    def batches(size):
        return [(x[i : i + size], y[i : i + size]) for i in range(0, 48, size)]

    stock, ours = mlp(keras.Model), mlp(keras.Model)
    start = stock.get_weights()
    make = OPTIMIZERS["adamw"]
    reference, optimizer = make(), AccumulationOptimizer(make(), 3)
    loop(stock, reference, batches(12), compiled)
    loop(ours, optimizer, batches(4), compiled)
    assert int(optimizer.iterations.numpy()) == 4
    assert distance(ours, stock, start) < TOLERANCE
    # By hand: three micro-batches short of nothing, then one more.
    loop(ours, optimizer, batches(4)[:1], compiled)
    assert optimizer.open_micro_batches == 1
    before = ours.get_weights()
    assert optimizer.discard_accumulated_gradients() == 1
    assert optimizer.apply_accumulated_gradients() == 0
    for old, new in zip(before, ours.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    loop(stock, reference, batches(4)[:1], compiled)
    loop(ours, optimizer, batches(4)[:1], compiled)
    assert optimizer.apply_accumulated_gradients() == 1
    assert distance(ours, stock, start) < 2 * TOLERANCE


def test_eager_apply_on_every_backend():
    """Two variables, one without gradient in the first window only."""
    a, b = keras.Variable([1.0, 2.0]), keras.Variable([3.0])
    optimizer = AccumulationOptimizer(SGD(1.0, weight_decay=0.5), 2)
    one, half = keras.ops.ones((2,)), keras.ops.ones((1,)) / 2
    optimizer.build([a, b])
    for grads in ([one, None], [3 * one, None]):
        with (
            pytest.warns(UserWarning, match="Gradients do not exist")
            if (optimizer.open_micro_batches)
            else keras.utils.CustomObjectScope({})
        ):
            optimizer.apply(grads)
    # Decay moves what has a gradient only: 1/2 - 2, 2/2 - 2.
    np.testing.assert_allclose(a.numpy(), [-1.5, -1.0])
    np.testing.assert_array_equal(b.numpy(), [3.0])
    # None in one of two micro-batches counts as zero.
    optimizer.apply([one, half], [a, b])
    optimizer.apply([one], [a])
    np.testing.assert_allclose(b.numpy(), [1.5 - 0.25])
    # And None again for a whole window.
    optimizer.apply([one], [a])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([one], [a])
    np.testing.assert_allclose(b.numpy(), [1.25])
    assert int(optimizer.iterations.numpy()) == 3


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_nothing_is_left_of_an_earlier_window():
    """A large variable, whose accumulators are overwritten, not zeroed."""
    a, b = keras.Variable([0.0]), keras.Variable(np.zeros(2**20 + 1))
    optimizer = AccumulationOptimizer(SGD(1.0), 2)
    optimizer.build([a, b])
    one, many = keras.ops.ones((1,)), keras.ops.ones(b.shape)
    for grads in ([one, many], [one, many], [one, None], [one, many]):
        optimizer.apply(grads)
    assert float(b.numpy()[0]) == -1.5


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.backend("tensorflow", "jax")
def test_gradients_that_another_trace_leaves_out():
    """Which variables got one is state of the window, not of a trace."""
    first, second = keras.Variable([0.0]), keras.Variable([1.0])
    variables = [first, second]
    optimizer = AccumulationOptimizer(SGD(0.1, weight_decay=0.5), 2)
    optimizer.build(variables)

    def grads(both):
        return [keras.ops.ones((1,)), keras.ops.ones((1,)) if both else None]

    if BACKEND == "jax":
        import jax

        @jax.jit
        def alone(state, own):
            return optimizer.stateless_apply(state, grads(False), own)

        @jax.jit
        def both(state, own):
            return optimizer.stateless_apply(state, grads(True), own)

        def run(step):
            new = step(
                [v.value for v in optimizer.variables],
                [v.value for v in variables],
            )
            held = variables, optimizer.variables
            for several, values in zip(held, new, strict=True):
                for variable, value in zip(several, values, strict=True):
                    variable.assign(value)

    else:
        import tensorflow as tf

        alone = tf.function(lambda: optimizer.apply(grads(False)))
        both = tf.function(lambda: optimizer.apply(grads(True)))

        def run(step):
            step()

    expected = [1.0]
    for window in ((alone, both), (both, alone), (alone, alone)):
        for step in window:
            run(step)
        value = expected[-1]
        if both in window:
            value = value * 0.95 - 0.1 / 2
        expected.append(value)
        assert float(second.numpy()[0]) == pytest.approx(value)
    # Without a gradient nothing moves it, not even decay, not by a bit.
    assert expected[-1] == expected[-2]
    assert int(optimizer.iterations.numpy()) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_variables_have_wide_accumulators(dtype):
    """256 small gradients are not rounded away: 1 + 2^-9 is 1 in bfloat16."""
    variable = keras.Variable([0.0], dtype=dtype)
    optimizer = AccumulationOptimizer(SGD(1.0), 257)
    optimizer.build([variable])
    tiny = 2**-9 if dtype == "bfloat16" else 2**-12
    optimizer.apply([keras.ops.ones((1,), dtype)])
    for _ in range(256):
        optimizer.apply([tiny * keras.ops.ones((1,), dtype)])
    expected = -(1 + 256 * tiny) / 257
    wide = keras.ops.cast(variable, "float32")
    value = float(keras.ops.convert_to_numpy(wide)[0])
    assert value == pytest.approx(expected, rel=2**-7)
    assert value != pytest.approx(-1 / 257, rel=2**-5)
