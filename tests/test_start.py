"""`python -m accumkit` before Keras is there: help, and which backend."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import accumkit
from accumkit import _start
from accumkit.backends import SUPPORTED

ROOT = Path(accumkit.__file__).parents[1]
HERE = keras.config.backend()

# For Python's start: these packages cannot be found.
HIDING = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {names}:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


@pytest.fixture
def job(tmp_path):
    """Runs the command where some modules are missing."""

    def run(*arguments, missing=(), backend=None, noted=None, python=("-m",)):
        (tmp_path / "sitecustomize.py").write_text(
            HIDING.format(names=list(missing))
        )
        home = tmp_path / "keras"
        home.mkdir(exist_ok=True)
        if noted:
            (home / "keras.json").write_text(f'{{"backend": "{noted}"}}')
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "KERAS_HOME": str(home),
        }
        environment.pop("KERAS_BACKEND", None)
        if backend is not None:
            environment["KERAS_BACKEND"] = backend
        return subprocess.run(
            [sys.executable, *python, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_help_needs_nothing(job):
    missing = [*SUPPORTED, "keras", "numpy", "pandas", "matplotlib"]
    for arguments in (
        ["accumkit", "--help"],
        ["accumkit.__main__", "--help"],
    ):
        done = job(*arguments, missing=missing)
        assert (done.returncode, done.stderr) == (0, "")
        assert "--accumulation-steps" in done.stdout
    done = job("-maccumkit", "--help", missing=missing, python=[])
    assert (done.returncode, done.stderr) == (0, "")


def test_without_any_framework(job):
    done = job("accumkit", missing=SUPPORTED)
    assert done.returncode == 2
    assert done.stderr == (
        "accumkit: none of tensorflow, jax, torch is installed. Install one: "
        'pip install "accumkit[jax]"\n'
    )


# Keras itself notes "tensorflow", whatever is installed.
@pytest.mark.parametrize("noted", [None, "tensorflow"])
def test_the_job_takes_what_is_installed_and_says_so(job, noted, tmp_path):
    small = "--samples 110 --batch-size 4 --accumulation-steps 5 --epochs 2"
    done = job(
        "accumkit",
        *small.split(),
        missing=set(SUPPORTED) - {HERE},
        noted=noted,
    )
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"Keras {keras.__version__} on {HERE}, ")
    assert (tmp_path / "runs.csv").exists()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("torch", "but it is not installed. Install it: pip install"),
        ("numpy", "but accumkit does not support it. Set it to"),
    ],
)
def test_what_the_user_names_is_not_replaced(job, wanted, message):
    done = job("accumkit", missing=["torch"], backend=wanted)
    assert done.returncode == 2
    assert done.stderr.startswith(f"accumkit: `KERAS_BACKEND` is '{wanted}', ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("wanted", "noted", "installed", "name", "why"),
    [
        ("jax", "torch", ["tensorflow", "jax", "torch"], "jax", "KERAS"),
        (None, "torch", ["tensorflow", "jax", "torch"], "torch", "k.json"),
        ("", "torch", ["tensorflow", "torch"], "torch", "k.json"),
        (None, None, ["tensorflow", "jax"], "tensorflow", "installed"),
        (None, "tensorflow", ["jax", "torch"], "jax", "installed"),
        (None, None, ["torch"], "torch", "installed"),
    ],
)
def test_who_chooses(wanted, noted, installed, name, why):
    chosen, reason = _start.choice(wanted, noted, "k.json", installed)
    assert chosen == name
    assert why in reason


def test_keras_file_is_found_where_keras_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    path = _start._keras_json()
    assert path == tmp_path / "keras.json"
    assert _start._named_in(path) is None
    path.write_text('{"backend": "jax"}')
    assert _start._named_in(path) == "jax"
    for unreadable in ("[]", "{", "{}"):
        path.write_text(unreadable)
        assert _start._named_in(path) is None
    monkeypatch.delenv("KERAS_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _start._keras_json() == tmp_path / ".keras" / "keras.json"


def test_a_folder_of_its_name_is_no_framework(tmp_path, monkeypatch):
    (tmp_path / "jaxx").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not _start._is_installed("jaxx")
    assert _start._is_installed(HERE)


@pytest.mark.parametrize(
    ("command", "is_job"),
    [
        (["-m", "accumkit"], True),
        (["-X", "dev", "-m", "accumkit", "-m", "x"], True),
        (["-Imaccumkit", "--help"], True),
        (["-m", "accumkit.__main__"], True),
        (["-m", "accumkit.plotting"], False),
        (["-m", "pytest", "accumkit"], False),
        (["-m", "my_accumkit"], False),
    ],
)
def test_main_job_starts(command, is_job, monkeypatch):
    # Python's own view while it looks for what `-m` names.
    at = next(i for i, word in enumerate(command) if word.count("m"))
    given = command[at + 2 :] if command[at] == "-m" else command[at + 1 :]
    monkeypatch.setattr(sys, "orig_argv", ["python", *command])
    monkeypatch.setattr(sys, "argv", ["-m", *given])
    assert _start.main_job_starts() is is_job
    monkeypatch.setattr(sys, "argv", ["/x/accumkit/__main__.py", *given])
    assert not _start.main_job_starts()


def test_importing_the_package_imports_all_of_it(job):
    code = (
        "import accumkit, keras; "
        "name = 'accumkit>RescaledSchedule'; "
        "assert keras.saving.get_registered_object(name)"
    )
    done = job("-c", code, backend=HERE, python=[])
    assert done.returncode == 0, done.stderr
