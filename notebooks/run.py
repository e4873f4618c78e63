"""Executes the notebooks: ``python notebooks/run.py [--write] [NAME ...]``.

With ``ACCUMKIT_SMALL=1`` each runs at a small size, as in CI. ``--write`` puts
the outputs and pictures into the files.
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Runs the notebooks; an assertion that fails in one is an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="all if none is given")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    paths = [HERE / name for name in options.names] or sorted(
        HERE.glob("*.ipynb")
    )
    if not paths:
        parser.error("no notebook found")
    for path in paths:
        begun = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, kernel_name="python3").execute(
            cwd=str(HERE)
        )
        if options.write:
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)
                # What frameworks say of the machine is no result.
                if cell.cell_type != "code":
                    continue
                cell["outputs"] = [
                    output
                    for output in cell.get("outputs", [])
                    if output.get("name") != "stderr"
                ]
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - begun:.0f} s", flush=True)
    print(f"{len(paths)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
