"""Measure accumkit against stock Keras: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import chart, report, results_file
from benchmarks.machine import describe
from benchmarks.results import Run
from benchmarks.rounds import Bench, Options, Pool
from benchmarks.systems import SYSTEMS, with_references
from benchmarks.workloads import WORKLOADS

_HERE = Path(__file__).resolve().parent
_NOT_QUICK = ("wide", "bert")
"""Left out of quick runs: in miniature ``wide`` is ``mlp``, and a pretrained
model has no miniature."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks; 1 where accumkit did not do the same work."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.quick and chosen.write_results:
        parser.error("--write-results: a quick run has no results")
    options = Options(
        backend=chosen.backend,
        jit=chosen.jit,
        quick=chosen.quick,
        rounds=1 if chosen.quick else chosen.rounds,
        seconds=0.0 if chosen.quick else 1.0,
    )
    workloads = chosen.workload or [
        name for name in WORKLOADS if not (chosen.quick and name in _NOT_QUICK)
    ]
    chosen.out.mkdir(parents=True, exist_ok=True)
    run = Run(
        options.backend,
        options.jit,
        options.quick,
        options.rounds,
        describe(options.backend),
    )
    pool = Pool(options, chosen.out / "logs")
    try:
        for name in workloads:
            systems = with_references(chosen.system or list(SYSTEMS))
            bench = Bench(WORKLOADS[name], systems, options, pool, _say)
            with tempfile.TemporaryDirectory() as folder:
                run.workloads.append(bench.run(Path(folder)))
            pool.done()
            # After each workload, so that an interrupted run leaves those
            # that are done.
            _store(run, chosen.out)
    finally:
        pool.close()
    print(report.text(run), end="")
    if chosen.write_results:
        path = _HERE / "RESULTS.md"
        old = path.read_text() if path.exists() else ""
        path.write_text(
            results_file.updated(old, report.title(run), report.markdown(run))
        )
    return 1 if run.wrong else 0


def _store(run: Run, folder: Path) -> None:
    name = run.backend + ("-xla" if run.jit else "")
    (folder / f"{name}.txt").write_text(report.text(run))
    (folder / f"{name}.json").write_text(report.as_json(run))
    chart.draw(run, folder / f"{name}.png")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _rounds(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__
    )
    parser.add_argument(
        "--backend",
        choices=report.TITLES,
        default=os.environ.get("KERAS_BACKEND", "tensorflow"),
    )
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, metavar="NAME"
    )
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, metavar="NAME")
    parser.add_argument("--rounds", type=_rounds, default=5)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes and one round: shows that it runs, not how fast",
    )
    parser.add_argument("--jit", action="store_true", help="compile with XLA")
    parser.add_argument("--out", type=Path, default=_HERE / "output")
    parser.add_argument(
        "--write-results",
        action="store_true",
        help="put the tables into RESULTS.md",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
