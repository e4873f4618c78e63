"""Shows on real data that accumulating is the large batch.

A small MLP is trained with Adam three ways, from the same start and in the
same sample order: with the micro-batch alone, with the micro-batch
accumulated N times, and with the large batch. The first and the last are
stock Keras.

The exit status is 1 if the accumulated run and the large batch differ by more
than rounding. How much rounding makes is measured: the large batch is trained
a second time with the samples of every batch in reverse order. After each of
the first two epochs the accumulated run may be ten times as far from the large
batch as that one, or 1e-5 of the way that the large batch went.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import accumkit
from accumkit import _start
from accumkit.proof import WAYS

if TYPE_CHECKING:
    from accumkit.proof.data import Data

# Adam's own default; the digits are few and bear a higher one.
LEARNING_RATE, OF_DIGITS = 0.001, 0.03


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m accumkit`.

    Args:
        arguments: Command-line arguments. Defaults to `None`: those of the
            process.

    Returns:
        The exit status: 0, or 1 if accumulated and large batch differ by more
        than rounding. Where there is nothing to run on (no framework, no
        data) it ends with status 2 and a line on stderr.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.npz is not None and options.data != "mnist":
        parser.error("`--npz` goes with `--data mnist` only.")
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError(
                "the curves need matplotlib. Install it with "
                '`pip install "accumkit[plot]"`.'
            )
        why = _start.choose_backend()
    except ImportError as error:
        _refuse(parser, error)
    if not hasattr(accumkit, "AccumulationMixin"):
        # What `__init__` left for when the backend is chosen.
        importlib.reload(accumkit)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        loaded = _data(options.data, options.npz).first(options.samples)
    except (ImportError, OSError, ValueError) as error:
        _refuse(parser, error)
    from accumkit.proof import report, runs, verdict

    print(_start.described(why), flush=True)
    rate = OF_DIGITS if options.data == "digits" else LEARNING_RATE
    proof = runs.train(
        loaded,
        batch_size=options.batch_size,
        accumulation_steps=options.accumulation_steps,
        epochs=options.epochs,
        learning_rate=options.learning_rate or rate,
        seed=options.seed,
        report=lambda run: print(report.progress(run), flush=True),
        way=options.way,
    )
    written = report.write(proof, options.out)
    result = verdict.judge(proof)
    print(f"\n{report.table(proof)}\n\n{report.distances(proof)}\n")
    print("Wrote", " and ".join(str(path) for path in written))
    if result.equal:
        print(result.sentence)
        return 0
    print(f"accumkit: {result.sentence}", file=sys.stderr)
    return 1


def _refuse(parser: argparse.ArgumentParser, error: Exception) -> NoReturn:
    """Ends with status 2 and one line, without the usage."""
    parser.exit(2, f"accumkit: {' '.join(str(error).split())}\n")


def _data(source: str, npz: pathlib.Path | None) -> Data:
    from accumkit.proof import data

    if source == "digits":
        return data.digits()
    if source != "mnist":
        return data.images(pathlib.Path(source))
    return data.mnist() if npz is None else data.images(npz, "--npz")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m accumkit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        default="digits",
        metavar="{digits,mnist,PATH}",
        help="scikit-learn's bundled digits (default), MNIST, which Keras "
        "downloads, or an .npz file with x_train, y_train, x_test, y_test",
    )
    add(
        "--npz",
        type=pathlib.Path,
        metavar="FILE",
        help="with `--data mnist`: the same as `--data FILE`",
    )
    add(
        "--samples",
        type=_integer_from(1),
        metavar="COUNT",
        help="train on the first COUNT samples (default: all)",
    )
    add(
        "--batch-size",
        type=_integer_from(1),
        default=8,
        metavar="B",
        help="samples of a micro-batch (default: 8)",
    )
    add(
        "--accumulation-steps",
        type=_integer_from(2),
        default=16,
        metavar="N",
        help="micro-batches of an optimizer step (default: 16)",
    )
    add(
        "--with",
        dest="way",
        choices=WAYS,
        default="mixin",
        help="what accumulates: AccumulationMixin (default) or "
        "AccumulationOptimizer",
    )
    add(
        "--epochs",
        type=_integer_from(1),
        default=15,
        help="(default: 15)",
    )
    add(
        "--learning-rate",
        type=_number,
        metavar="RATE",
        help="of Adam (default: 0.03 for digits, else 0.001)",
    )
    add(
        "--seed",
        type=_integer_from(0),
        default=0,
        help="of the initial weights and the sample order (default: 0)",
    )
    add(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("."),
        metavar="DIR",
        help="where curves.png and runs.csv go (default: here)",
    )
    return parser


def _integer_from(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(
                f"must be an integer from {least} on. Received: {text}"
            )
        return value

    return integer


def _number(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(
            f"must be a positive number. Received: {text}"
        )
    return value


if __name__ == "__main__":
    sys.exit(main())
