"""The benchmark: its arithmetic, its report, and one run in miniature."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from benchmarks import equality, report, results_file
from benchmarks.results import Run, SystemResult, WorkloadResult
from benchmarks.statistics import Spread, rotated, speedups, spread
from benchmarks.systems import SYSTEMS, with_references
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent


def test_spread_is_median_and_extremes():
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread(iter([1.0, 2.0])) == Spread(1.5, 1.0, 2.0)


def test_ratios_are_taken_within_a_round():
    # The machine is four times slower in the second round: the ratio is not.
    assert speedups([2.0, 8.0], [1.0, 4.0]) == [2.0, 2.0]


def test_rounds_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match="zip"):
        speedups([1.0, 2.0], [1.0])


def test_each_round_begins_with_another_system():
    orders = [rotated(["a", "b", "c"], turn) for turn in range(4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert rotated([], 1) == []


def test_the_large_batch_comes_along_where_something_is_compared_with_it():
    assert with_references(["within"]) == ["large", "within"]
    assert with_references(["keras", "micro"]) == ["micro", "keras"]


def test_agreement_is_relative_to_the_movement():
    before = [np.full(100, 50.0, "float32")]
    expected = [before[0] - 1]
    near = equality.agreement(before, [expected[0] + 1e-5], expected)
    assert near.holds
    assert near.difference == pytest.approx(1e-5, rel=0.5)
    assert near.movement == pytest.approx(1 / 50)


@pytest.mark.parametrize(
    ("after", "expected", "same_start"),
    [
        pytest.param(9.75, 9.0, True, id="divided by 4"),
        pytest.param(9.001, 9.0, True, id="a thousandth off"),
        pytest.param(10.0, 10.0, True, id="nothing moved"),
        pytest.param(9.0, 9.0, False, id="another start"),
    ],
)
def test_agreement_fails(after, expected, same_start):
    before, after, expected = (
        [np.full(3, value, "float32")] for value in (10.0, after, expected)
    )
    found = equality.agreement(before, after, expected, same_start)
    assert not found.holds


def _run(**systems: SystemResult) -> Run:
    result = WorkloadResult(
        WORKLOADS["mlp"],
        {name.replace("_", "-"): value for name, value in systems.items()},
    )
    machine = {
        "date": "today",
        "processor": "abacus",
        "cores": 1,
        "system": "wood",
        "load_before": 0.0,
        "versions": {"keras": "3"},
    }
    return Run("jax", False, False, 2, machine, [result])


def _system(name: str, *seconds: float, difference: float = 1e-7):
    return SystemResult(
        name,
        SYSTEMS[name].checked,
        seconds=list(seconds),
        peak=7_000_000,
        agreement=equality.Agreement(difference, 1.0, True),
    )


def test_the_table_has_ratios_to_the_references_that_were_run():
    run = _run(
        keras=_system("keras", 4e-6, 8e-6), within=_system("within", 1e-6, 1e-6)
    )
    heading, keras_row, within = report.rows(run.workloads[0])
    assert heading == [
        "system",
        "us per sample",
        "x keras",
        "peak MB",
        "against large",
    ]
    assert keras_row[2] == "1"
    assert within == ["within", "1 (1-1)", "6.00 (4.00-8.00)", "7", "1.0e-07"]
    content = json.loads(report.as_json(run))
    speed = content["workloads"][0]["systems"]["within"]["speed"]["keras"]
    assert speed == {"median": 6.0, "low": 4.0, "high": 8.0}


def test_what_makes_a_run_fail():
    unchecked = _system("across", 1e-6)
    unchecked.agreement = None
    failed = SystemResult("optimizer", True, failure="broken")
    run = _run(
        micro=_system("micro", 1e-6, difference=1e-8),
        keras=_system("keras", 1e-6, difference=1.0),
        across=unchecked,
        across_spe=SystemResult("across-spe", True, absent="not here"),
        within=_system("within", 1e-6, difference=1e-3),
        optimizer=failed,
    )
    assert run.wrong == [
        "mlp/micro",
        "mlp/across",
        "mlp/within",
        "mlp/optimizer",
    ]
    assert "mlp/within" in report.text(run)


def test_new_results_replace_their_own_section_only():
    text = results_file.updated("", "JAX", {"mlp": "old", "wide": "kept"})
    text = results_file.updated(text, "torch", {"mlp": "of torch"})
    text = results_file.updated(text, "JAX", {"mlp": "new"})
    assert text.startswith("# Results\n")
    assert "old" not in text
    parts = ["## JAX", "### mlp", "new", "### wide", "kept", "## torch"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert results_file.updated(text, "JAX", {"mlp": "new"}) == text


def test_a_quick_run(tmp_path):
    backend = keras.config.backend()
    command = [sys.executable, "-m", "benchmarks", "--quick"]
    command += ["--backend", backend, "--out", str(tmp_path)]
    command += ["--workload", "mlp", "--system", "keras", "across", "within"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "us per sample" in done.stdout
    content = json.loads((tmp_path / f"{backend}.json").read_text())
    systems = content["workloads"][0]["systems"]
    assert list(systems) == ["large", "keras", "across", "within"]
    for name in ("across", "within"):
        assert systems[name]["agreement"]["movement"] > 0
        assert systems[name]["agreement"]["holds"]
        assert systems[name]["speed"]["keras"]["median"] > 0
    assert (tmp_path / f"{backend}.png").stat().st_size > 10_000
