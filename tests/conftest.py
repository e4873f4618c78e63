"""What all tests share: modes of compilation and a clean Keras."""

import atexit
import gc
import os
import shutil
import tempfile

# Before a framework starts: several devices on the one processor, for the
# tests of data parallelism.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

# Half of the time on JAX goes into compiling the same programs again. The
# processes of pytest-xdist and the tests' own find the folder here.
CACHE = "JAX_COMPILATION_CACHE_DIR"
if os.environ.get("KERAS_BACKEND") == "jax" and CACHE not in os.environ:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="accumkit-jax-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)

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


def pytest_collection_finish():
    """Spares each test's collection what the frameworks have loaded.

    `clear_session` collects: a third of a second for each test otherwise.
    """
    keras.utils.set_random_seed(7)
    keras.utils.clear_session()
    gc.freeze()


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
