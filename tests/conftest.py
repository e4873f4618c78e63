"""What all tests share: modes of compilation and a clean Keras."""

import os

# Before a framework starts: several devices on the one processor, for the
# tests of data parallelism.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
import pytest

if keras.config.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )

MODES = {
    "tensorflow": {
        "eager": {"run_eagerly": True},
        "graph": {"jit_compile": False},
        "xla": {"jit_compile": True},
    },
    "jax": {
        "eager": {"run_eagerly": True},
        "jit": {"jit_compile": True},
    },
    "torch": {"eager": {}},
}[keras.config.backend()]


@pytest.fixture(params=list(MODES))
def mode(request):
    """Arguments of `compile` for each way in which the backend can run."""
    return MODES[request.param]


@pytest.fixture(autouse=True)
def clean():
    """Each test starts from the same seed and leaves no global state."""
    keras.utils.set_random_seed(7)
    yield
    keras.utils.clear_session()


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "backend(name): runs on this Keras backend only"
    )


def pytest_collection_modifyitems(items):
    name = keras.config.backend()
    for item in items:
        only = item.get_closest_marker("backend")
        if only and name not in only.args:
            # Tests of one framework's machinery; each has a counterpart.
            item.add_marker(pytest.mark.skip(reason=f"not for {name}"))
