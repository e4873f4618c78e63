"""The proof on real data: what it says, writes and returns."""

import contextlib
import io
import re
import sys

import numpy as np
import pandas as pd
import pytest

import accumkit
from accumkit import __main__ as proof_command
from accumkit.proof import WAYS, data, runs, verdict

SMALL = "--samples 110 --batch-size 4 --accumulation-steps 5 --epochs 2".split()


def run(folder, *options):
    return proof_command.main([*SMALL, "--out", str(folder), *options])


@pytest.fixture
def npz(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {
        "x_train": generator.integers(0, 256, (40, 4, 4), dtype="uint8"),
        "y_train": np.arange(40) % 3,
        "x_test": generator.integers(0, 256, (10, 4, 4), dtype="uint8"),
        "y_test": np.arange(10) % 3,
    }
    path = tmp_path / "images.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module", params=WAYS)
def proven(request, tmp_path_factory):
    """One run of the command: exit status, folder and what it printed."""
    folder = tmp_path_factory.mktemp("proof") / "new"
    printed = io.StringIO()
    # The default is the mixin.
    options = [] if request.param == "mixin" else ["--with", request.param]
    with contextlib.redirect_stdout(printed):
        status = run(folder, *options)
    return status, folder, printed.getvalue()


def test_accumulated_is_the_large_batch(proven):
    status, folder, _ = proven
    assert status == 0
    rows = pd.read_csv(folder / "runs.csv").set_index(["run", "epoch"])
    assert len(rows) == 3 * 2
    # 110 samples: 28 micro-batches, the last of 2, in 6 windows, the last
    # of 3 micro-batches.
    assert rows.loc["micro-batch", "optimizer_steps"].tolist() == [28, 56]
    assert rows.loc["accumulated", "optimizer_steps"].tolist() == [6, 12]
    assert rows.loc["large batch", "optimizer_steps"].tolist() == [6, 12]
    for name in ("micro-batch", "accumulated", "large batch"):
        assert rows.loc[name, "samples"].tolist() == [110, 220]
    accumulated, large = rows.loc["accumulated"], rows.loc["large batch"]
    for metric in ("loss", "val_loss", "accuracy", "val_accuracy"):
        np.testing.assert_allclose(
            accumulated[metric], large[metric], rtol=1e-4
        )
    assert (accumulated["distance"] < 1e-5).all()
    assert (rows.loc["micro-batch", "distance"] > 0.1).all()
    assert (large["distance"] == 0).all()


def test_picture_is_written(proven):
    _, folder, _ = proven
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_output(proven):
    _, _, out = proven
    # Three runs and the yardstick, a line for each of the two epochs.
    assert len(re.findall(r"^.* epoch +[12] .* s$", out, re.MULTILINE)) == 8
    numbers = {}
    for name in ("micro-batch", "accumulated", "large batch"):
        row = re.search(rf"^{name}((?: +[\d.]+){{6}})$", out, re.MULTILINE)
        numbers[name] = row[1].split()
    assert numbers["micro-batch"][:3] == ["4", "1", "56"]
    assert numbers["accumulated"][:3] == ["4", "5", "12"]
    assert numbers["large batch"][:3] == ["20", "1", "12"]
    assert numbers["accumulated"][4] == numbers["large batch"][4]
    assert "The accumulated run is the large batch, to rounding" in out


def test_wrong_weighting_is_found(tmp_path, monkeypatch, capsys):
    # Every micro-batch weighs the same, the ragged one too.
    monkeypatch.setattr(
        runs.Net,
        "accumulation_weight",
        lambda self, x, y, y_pred, sample_weight: 1.0,
        raising=False,
    )
    assert run(tmp_path, "--epochs", "1") == 1
    out, err = capsys.readouterr()
    assert "accumkit: the accumulated run is not the large batch" in err
    assert "to rounding" not in out
    assert (tmp_path / "curves.png").exists()


def test_wrong_weighting_of_the_optimizer_is_found(
    tmp_path, monkeypatch, capsys
):
    uniform = accumkit.AccumulationOptimizer
    monkeypatch.setattr(
        accumkit,
        "AccumulationOptimizer",
        lambda optimizer, n, weighting: uniform(optimizer, n),
    )
    assert run(tmp_path, "--epochs", "1", "--with", "optimizer") == 1
    _, err = capsys.readouterr()
    assert "accumkit: the accumulated run is not the large batch" in err


def test_every_run_sees_the_same_windows(npz):
    images = data.images(npz)
    settings = {"learning_rate": 0.01, "seed": 3, "report": lambda run: None}
    proof = runs.train(images, 2, 4, 1, **settings)
    again = runs.train(images, 2, 4, 1, **settings)
    starts = [run.weights[0] for run in proof.shown]
    assert all((start == starts[0]).all() for start in starts)
    for ours, theirs in zip(proof.shown, again.shown, strict=True):
        np.testing.assert_allclose(ours.weights[1], theirs.weights[1])


@pytest.mark.parametrize(
    ("off", "rounding", "equal"),
    [
        (2e-6, 3e-7, True),
        (2e-5, 3e-7, False),
        (2e-5, 5e-6, True),
        (1e-1, 1e-1, False),
        (np.nan, 3e-7, False),
        (3e-7, np.nan, False),
    ],
)
def test_verdict(off, rounding, equal):
    def run_at(distance):
        weights = [np.zeros(2), np.array([1.0, distance])]
        return runs.Run("run", 1, rows=[{}], weights=weights)

    proof = runs.Proof(
        micro=run_at(1.0),
        accumulated=run_at(off),
        large=run_at(0.0),
        reordered=run_at(rounding),
    )
    assert verdict.judge(proof).equal is equal


def test_npz(npz, tmp_path):
    images = data.images(npz)
    assert images.x_train.shape == (40, 16)
    assert images.x_train.max() == 1.0
    assert images.classes == 3
    options = ["--data", "mnist", "--npz", str(npz), "--samples", "30"]
    assert run(tmp_path, *options) == 0
    assert pd.read_csv(tmp_path / "runs.csv")["samples"].max() == 60


def test_data_takes_a_file(npz, tmp_path):
    assert run(tmp_path, "--data", str(npz), "--samples", "30") == 0
    assert pd.read_csv(tmp_path / "runs.csv")["samples"].max() == 60


def refused(folder, capsys, *options):
    """The one line on stderr with which the command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        run(folder, *options)
    assert exit_info.value.code == 2
    line, rest = capsys.readouterr().err.split("\n", 1)
    assert not rest
    assert line.startswith("accumkit: ")
    return line


def test_mnist_without_a_connection(tmp_path, monkeypatch, capsys):
    def load_data():
        raise Exception("URL fetch failure on https://x/mnist.npz:\nNone")

    monkeypatch.setattr("keras.datasets.mnist.load_data", load_data)
    line = refused(tmp_path, capsys, "--data", "mnist")
    assert "(URL fetch failure on https://x/mnist.npz: None)" in line
    assert "give that: --data PATH" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be digits, mnist or an .npz file"),
        (b"", "no data left in file"),
        (b"PK\x03\x04 damaged", "not a zip file"),
        (b"some text", "pickle"),
        ({"x": np.zeros(3)}, "which has ['x']"),
        (np.zeros(3), "must be digits, mnist or an .npz file"),
        ({"y_train": np.zeros(3)}, "There must be a label for each image"),
        ({"x_test": np.array(3)}, "There must be a label for each image"),
        ({"x_test": np.array([{}])}, "pickle"),
    ],
    ids=range(9),
)
def test_files_that_are_no_images(content, message, npz, tmp_path, capsys):
    path = tmp_path / "file.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        with path.open("wb") as file:
            np.save(file, content)
    elif content is not None:
        whole = {} if "x" in content else dict(np.load(npz))
        np.savez(path, **whole | content)
    line = refused(tmp_path, capsys, "--data", str(path))
    assert message.lower() in line.lower()
    assert str(path) in line


def test_digits_are_split_alike_every_time():
    first, second = data.digits(), data.digits()
    assert first.x_train.shape == (1437, 64)
    assert first.x_test.shape == (360, 64)
    assert (first.x_train == second.x_train).all()
    assert first.classes == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "must be an integer from 1 on. Received: 0"),
        (["--batch-size", "x"], "invalid integer value: 'x'"),
        (["--accumulation-steps", "1"], "must be an integer from 2 on"),
        (["--with", "magic"], "invalid choice: 'magic'"),
        (["--epochs", "0"], "must be an integer from 1 on"),
        (["--seed", "-1"], "must be an integer from 0 on"),
        (["--learning-rate", "0"], "must be a positive number. Received: 0"),
        (["--learning-rate", "inf"], "must be a positive number"),
        (["--samples", "5000"], "must be at most 1437"),
        (["--npz", "mnist.npz"], "`--npz` goes with `--data mnist` only"),
        (["--data", "mnist", "--npz", "no.npz"], "No such file"),
    ],
)
def test_bad_options(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        run(tmp_path, *options)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_npz_without_the_arrays(tmp_path, capsys):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    options = ["--data", "mnist", "--npz", str(tmp_path / "other.npz")]
    with pytest.raises(SystemExit):
        run(tmp_path, *options)
    assert "which has ['x']" in capsys.readouterr().err


def test_missing_packages_name_the_extra(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(SystemExit):
            run(tmp_path)
    assert 'pip install "accumkit[demo]"' in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run(tmp_path)
    assert 'pip install "accumkit[plot]"' in capsys.readouterr().err
