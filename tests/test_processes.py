"""Two processes over the loopback, or what stands for them (case 36)."""

import json
import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from models import distance, fit_in_order, mlp, regression_data

from accumkit.backends import processes

HERE = Path(__file__).resolve().parent
SECONDS = 400


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(folder, *commands):
    """Runs commands side by side; what each printed. None outlives this."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        "XLA_FLAGS": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    running, files = [], []
    try:
        for index, command in enumerate(commands):
            files.append([folder / f"{index}.{end}" for end in ("out", "err")])
            with files[-1][0].open("w") as out, files[-1][1].open("w") as err:
                running.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, command)],
                        env=environment,
                        stdout=out,
                        stderr=err,
                        stdin=subprocess.DEVNULL,
                    )
                )
        end = time.monotonic() + SECONDS
        for process in running:
            process.wait(max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pass  # said below, with what they printed
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
    printed = [[file.read_text() for file in pair] for pair in files]
    codes = [process.returncode for process in running]
    assert codes == [0] * len(commands), f"{codes}\n" + "\n\n".join(
        err[-3000:] for _, err in printed
    )
    return [out for out, _ in printed]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What came out of each case in both processes, and their folder."""
    folder = tmp_path_factory.mktemp("two")
    address = folder / "store"
    if keras.config.backend() == "jax":
        address = f"127.0.0.1:{free_port()},127.0.0.1:0"
    worker = HERE / "process_worker.py"
    commands = [[worker, rank, address, folder] for rank in (0, 1)]
    run_all(folder, *commands)
    both = [json.loads((folder / f"{i}.json").read_text()) for i in (0, 1)]
    return both, folder


def case(two, name):
    return [results[name] for results in two[0]]


def stock(samples, batch_size):
    model = mlp(keras.Model)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    start, _ = fit_in_order(model, regression_data(samples), batch_size)
    return model, start


def holding(weights):
    """Stands for a model with these weights."""
    arrays = [np.array(w, "float32") for w in weights]
    return types.SimpleNamespace(get_weights=lambda: arrays)


@pytest.mark.backend("jax")
@pytest.mark.parametrize("samples", [64, 70])
def test_36_equal_shares_are_the_large_batch(two, samples):
    # 8 samples of each process, two of which make a window.
    large, start = stock(samples, 32)
    other, _ = stock(samples, 16)
    for found in case(two, f"{samples} samples"):
        assert found["error"] is None
        assert found["steps"] == 2 * -(-samples // 32)
        assert distance(holding(found["weights"]), large, start) < 3e-6
        assert distance(holding(found["weights"]), other, start) > 1e-2
        assert found["rows"] == [32, 32, 6][: -(-samples // 32)] * 2


@pytest.mark.backend("jax")
def test_36_pieces_of_equal_shares(two):
    large, start = stock(70, 64)
    for found in case(two, "pieces"):
        assert found["error"] is None
        assert distance(holding(found["weights"]), large, start) < 3e-6


@pytest.mark.backend("jax")
def test_36_equal_batches_of_a_generator(two):
    first, second = case(two, "equal batches")
    assert (first["error"], first["steps"]) == (None, 2)
    assert first == second
    assert first["weights"] != mlp_weights()


def mlp_weights():
    return [w.tolist() for w in mlp(keras.Model).get_weights()]


@pytest.mark.backend("jax")
@pytest.mark.parametrize(
    ("name", "said", "steps"),
    [
        ("71 samples", "samples: 36 in process 0, 35 in process 1", 0),
        ("options", "micro_batch_size: 3 in process 0, 4 in process 1", 0),
        ("unequal batches", "1: 8 in process 0, 6 in process 1", 1),
        ("fewer batches", "1: 16 in process 0, no batch in process 1", 1),
        ("in one execution", "2: 16 in process 0, 14 in process 1", 1),
        ("one unequal batch", "1: 16 in process 0, 14 in process 1", 0),
        ("no distribution", "2 processes and no distribution", 0),
    ],
)
def test_36_unequal_shares_raise_in_both(two, name, said, steps):
    first, second = case(two, name)
    assert first == second
    assert first["error"].startswith("ValueError: ")
    assert said in first["error"]
    assert first["steps"] == steps
    # What was trained before is still there.
    assert (first["weights"] == mlp_weights()) is (steps == 0)


@pytest.mark.backend("jax")
def test_36_what_fails_in_one_process_ends_both(two):
    first, second = case(two, "failing data")
    assert "16 in process 0, an error in process 1" in first["error"]
    assert second["error"] == "OSError: no such file"
    assert first["weights"] == second["weights"] != mlp_weights()
    assert case(two, "one batch")[1]["error"] is None


@pytest.mark.backend("torch")
def test_36_torch_refuses(two):
    for name in ("window", "pieces"):
        for found in case(two, name) + case(two, f"train_on_batch of a {name}"):
            assert found["error"].startswith("ValueError: ")
            assert "a world size of 2" in found["error"]
            assert found["weights"] == mlp_weights()
    # Without accumulation it is stock Keras, which trains two models.
    first, second = case(two, "stock")
    assert first["error"] is second["error"] is None
    assert first["steps"] == second["steps"] == 1
    assert first["weights"] != second["weights"]


@pytest.mark.backend("jax", "torch")
def test_only_the_first_process_writes_files(two):
    name = "70 samples" if keras.config.backend() == "jax" else "stock"
    rows = [found["rows"] for found in case(two, name)]
    assert rows[0] == rows[1] != []
    path = two[1] / f"{name.split()[0]}.csv"
    header, *lines = path.read_text().splitlines()
    assert header.startswith("optimizer_step,")
    steps = [int(line.split(",")[0]) for line in lines]
    assert steps == list(range(1, len(rows[0]) + 1))


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize(
    ("jobs", "task", "index", "first"),
    [
        (["worker"], "worker", 0, True),
        (["worker"], "worker", 1, False),
        (["chief", "worker"], "worker", 0, False),
        (["chief", "worker"], "chief", 0, True),
        (["worker"], None, None, True),
    ],
)
def test_the_first_worker(jobs, task, index, first):
    import tensorflow as tf

    cluster = {job: ["127.0.0.1:1", "127.0.0.1:2"] for job in jobs}
    cluster |= {"chief": ["127.0.0.1:3"]} if "chief" in jobs else {}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type=task, task_id=index
    )
    strategy = types.SimpleNamespace(cluster_resolver=resolver)
    model = types.SimpleNamespace(distribute_strategy=strategy)
    assert processes.is_first(model) is first
    model = types.SimpleNamespace(distribute_strategy=types.SimpleNamespace())
    assert processes.is_first(model)


PARAMETER_SERVER = """
import sys
import keras
import tensorflow as tf
import accumkit
from models import Net, mlp, regression_data

ports = sys.argv[1:]
cluster = {
    job: [f"127.0.0.1:{port}"]
    for job, port in zip(("worker", "ps"), ports, strict=True)
}
servers = [tf.distribute.Server(cluster, job, 0) for job in cluster]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(cluster), rpc_layer="grpc"
)
strategy = tf.distribute.ParameterServerStrategy(resolver)


def refused(setting, call):
    try:
        call()
    except ValueError as error:
        assert str(error).startswith(f"`{setting}` must not"), error
        assert "ParameterServerStrategyV2" in str(error)
    else:
        raise AssertionError(setting)


with strategy.scope():
    model = mlp(Net)
    refused("accumulation_steps", lambda: model.compile(
        "sgd", "mse", accumulation_steps=2))
    refused("micro_batch_size", lambda: model.compile(
        "sgd", "mse", micro_batch_size=2))
    model.compile("sgd", "mse")
    refused("accumulation_steps", lambda: setattr(
        model, "accumulation_steps", 2))
    optimizer = accumkit.AccumulationOptimizer("sgd", 2)
    refused("AccumulationOptimizer", lambda: optimizer.build(
        model.trainable_variables))
print("refused")
"""


@pytest.mark.backend("tensorflow")
def test_parameter_servers_are_refused(tmp_path):
    ports = [free_port(), free_port()]
    (printed,) = run_all(tmp_path, ["-c", PARAMETER_SERVER, *ports])
    assert printed.split()[-1] == "refused"
