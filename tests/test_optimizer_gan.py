"""Two `AccumulationOptimizer`s in a train step of one's own."""

import keras
import numpy as np
import pytest
from models import one_weight, ones, weight
from optimizers import SGD

from accumkit import AccumulationOptimizer
from accumkit.callbacks.accumulation_optimizer_remainder import (
    OptimizerRemainder,
)

BACKEND = keras.config.backend()


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
