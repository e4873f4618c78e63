"""What all tests share: two tiers, modes of compilation, a clean Keras."""

import atexit
import collections
import gc
import importlib.metadata
import itertools
import os
import shutil
import tempfile

# Before a framework starts: several devices on the one processor, for the
# tests of data parallelism.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

# Half of the time on JAX goes into compiling the same programs again. The
# processes of pytest-xdist and the tests' own find the folder here. With JAX
# 0.4.36 programs from the cache crash or compute something else, in two runs
# of four; 0.10 to 0.12 are the versions that it was tried with.
CACHE = "JAX_COMPILATION_CACHE_DIR"
if (
    os.environ.get("KERAS_BACKEND") == "jax"
    and CACHE not in os.environ
    and int(importlib.metadata.version("jax").split(".")[1]) >= 10
):
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
TESTS = itertools.count(1)
# What `compile` chooses on a CPU.
DEFAULT = {"tensorflow": "graph", "jax": "jit", "torch": "eager"}[
    keras.config.backend()
]


@pytest.fixture(params=list(MODES))
def mode(request):
    """Arguments of `compile` for each way in which the backend can run."""
    return MODES[request.param]


@pytest.fixture(autouse=True)
def clean():
    """Each test starts from the same seed and leaves no global state."""
    keras.utils.set_random_seed(7)
    yield
    # Collecting takes half a second where a framework has traced a lot: a
    # third of all the time, if it were done after each test.
    keras.utils.clear_session(free_memory=next(TESTS) % 25 == 0)


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


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="run all tests: every mode, every combination of parameters; "
        "else a core with each promise once",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "backend(name): runs on this Keras backend only"
    )
    config.addinivalue_line("markers", "full: with `--full` only")


def pytest_report_header(config):
    return None if everything(config) else "the core; all tests: --full"


def everything(config):
    """Whether nothing is left out; a test that is named always runs."""
    return config.getoption("full") or any("::" in arg for arg in config.args)


def values(item):
    """What an item has for each `parametrize` of its test."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        yield tuple((name, id(item.callspec.params[name])) for name in names)


def in_core(items):
    """The items that have each value of each parameter once.

    Of stacked `parametrize`s that is a diagonal of their product, of one
    alone all of it. Among the modes it is the one that `compile` chooses.
    """
    tests = collections.defaultdict(dict)
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if not item.get_closest_marker("full") and (
            parameters.get("mode", DEFAULT) == DEFAULT
        ):
            tests[item.nodeid.split("[")[0]][item] = set(values(item))
    core = set()
    for product in tests.values():
        seen = set()
        for item, own in product.items():
            if not own & seen:
                core.add(item)
                seen |= own
        for item, own in product.items():
            if own - seen:
                core.add(item)
                seen |= own
    return core


def pytest_collection_modifyitems(config, items):
    name = keras.config.backend()
    for item in items:
        only = item.get_closest_marker("backend")
        if only and name not in only.args:
            # Tests of one framework's machinery; each has a counterpart.
            item.add_marker(pytest.mark.skip(reason=f"not for {name}"))
    if everything(config):
        return
    core = in_core(items)
    config.hook.pytest_deselected(items=[i for i in items if i not in core])
    items[:] = [item for item in items if item in core]
