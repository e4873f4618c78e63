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

from accumkit.proof import data, report, runs, verdict

# Adam's own default on MNIST; the digits are few and bear a higher one.
LEARNING_RATES = {"digits": 0.03, "mnist": 0.001}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m accumkit`.

    Args:
        arguments: Command-line arguments. Defaults to `None`: those of the
            process.

    Returns:
        The exit status: 0, or 1 if accumulated and large batch differ by more
        than rounding.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.npz is not None and options.data != "mnist":
        parser.error("`--npz` goes with `--data mnist` only.")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "the curves need matplotlib. Install it with "
            '`pip install "accumkit[plot]"`.'
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.data == "digits":
            loaded = data.digits()
        else:
            loaded = data.mnist(options.npz)
        loaded = loaded.first(options.samples)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    proof = runs.train(
        loaded,
        batch_size=options.batch_size,
        accumulation_steps=options.accumulation_steps,
        epochs=options.epochs,
        learning_rate=options.learning_rate or LEARNING_RATES[options.data],
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m accumkit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        choices=["digits", "mnist"],
        default="digits",
        help="scikit-learn's bundled digits (default) or MNIST",
    )
    add(
        "--npz",
        type=pathlib.Path,
        metavar="FILE",
        help="MNIST, or other images, as x_train, y_train, x_test, y_test",
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
        choices=runs.WAYS,
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
        help="of Adam (default: 0.03 for digits, 0.001 for mnist)",
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
