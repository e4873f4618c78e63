"""What the README and the docstrings show runs, on every backend."""

import builtins
import doctest
import importlib
import inspect
import pkgutil
import re
import symtable
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest

import accumkit

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

SECTIONS = re.findall(
    r"^(#{1,2} [^\n]+)\n(.*?)(?=^#{1,2} |\Z)", README, re.MULTILINE | re.DOTALL
)
START = "The shortest example"


@pytest.fixture(autouse=True)
def clean():
    """Keras's state is reset where examples train; most tests only read."""


@pytest.fixture
def fresh():
    keras.utils.set_random_seed(7)
    yield
    keras.utils.clear_session()


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


BLOCKS = {
    title.lstrip("# "): blocks
    for title, body in SECTIONS
    if (blocks := python_blocks(body))
}


def run(source, namespace, where):
    exec(compile(source, where, "exec"), namespace)


def test_no_block_of_the_readme_is_passed_over():
    # Headings inside code blocks would cut a section, and its block, in two.
    found = sum(len(blocks) for blocks in BLOCKS.values())
    assert found == README.count("```python") >= 10
    assert START in BLOCKS


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("section", BLOCKS)
def test_readme(section, tmp_path, monkeypatch):
    """Each section runs on top of the shortest example."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for title in dict.fromkeys((START, section)):
        for block in BLOCKS[title]:
            run(block, namespace, f"README.md, {title}")
    model = namespace["model"]
    assert model.optimizer_steps > 0 or section == "Sizing a schedule"


def modules():
    yield accumkit
    for found in pkgutil.walk_packages(accumkit.__path__, "accumkit."):
        parts = found.name.split(".")
        if "backends" in parts or "__main__" in parts:
            continue
        yield importlib.import_module(found.name)


def documented():
    """Every object of ours with a docstring: `(name, module, docstring)`."""
    seen = set()
    for module in modules():
        members = [(module.__name__, module)]
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            members.append((f"{module.__name__}.{name}", value))
            if inspect.isclass(value):
                members += [
                    (f"{module.__name__}.{name}.{inner}", function)
                    for inner, function in vars(value).items()
                    if callable(function) or isinstance(function, property)
                ]
        for name, value in members:
            text = inspect.getdoc(value) or ""
            if name not in seen and text:
                seen.add(name)
                yield name, module, text


DOCSTRINGS = list(documented())
EXAMPLES = [
    pytest.param(module, block, id=f"{name}-{number}")
    for name, module, text in DOCSTRINGS
    for number, block in enumerate(python_blocks(text))
]


def undefined(source):
    """Names that a block uses without defining them."""

    def free(table):
        for symbol in table.get_symbols():
            is_global = symbol.is_global() or table.get_type() == "module"
            if is_global and symbol.is_referenced():
                yield symbol.get_name()
        for child in table.get_children():
            yield from free(child)

    table = symtable.symtable(source, "<docstring>", "exec")
    defined = {
        s.get_name()
        for s in table.get_symbols()
        if s.is_assigned() or s.is_imported() or s.is_namespace()
    }
    return set(free(table)) - defined - set(dir(builtins))


class Dataset(keras.utils.PyDataset):
    """Four batches."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.zeros((8, 3), "float32"), np.zeros((8, 1), "float32")


def stand_ins():
    """What examples take for granted: a small model and its data."""

    class Net(accumkit.AccumulationMixin, keras.Model):
        pass

    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(inputs)
    model = Net(inputs, outputs)
    model.compile("sgd", "mse", metrics=["accuracy"], accumulation_steps=2)
    x, y = np.zeros((32, 3), "float32"), np.zeros((32, 1), "float32")
    history = keras.callbacks.History()
    history.epoch, history.history = [0, 1], {"loss": [2.0, 1.0]}
    return {
        "Net": Net,
        "accumkit": accumkit,
        "dataset": Dataset(),
        "epochs": 2,
        "history": history,
        "inputs": inputs,
        "keras": keras,
        "model": model,
        "np": np,
        "outputs": outputs,
        "x": x,
        "y": y,
    }


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("module", "source"), EXAMPLES)
def test_docstring(module, source, tmp_path, monkeypatch):
    """Runs a block where all that it uses is there; compiles any."""
    monkeypatch.chdir(tmp_path)
    source = textwrap.dedent(source)
    # What examples define, as those of classes and their methods do.
    namespace = {**vars(module), **stand_ins(), "__name__": "docstring"}
    code = compile(source, module.__name__, "exec")
    if not undefined(source) - namespace.keys():
        with pytest.MonkeyPatch.context() as patch:
            # Examples show filters; they must not outlive this test.
            patch.setattr("warnings.filterwarnings", lambda *a, **k: None)
            exec(code, namespace)
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")


def test_most_docstring_examples_run():
    known = stand_ins().keys()
    skipped = [
        example.id
        for example in EXAMPLES
        if undefined(textwrap.dedent(example.values[1]))
        - known
        - vars(example.values[0]).keys()
    ]
    assert len(skipped) <= len(EXAMPLES) // 4, skipped


@pytest.mark.parametrize(
    "module", [pytest.param(m, id=m.__name__) for m in modules()]
)
def test_prompts(module, tmp_path, monkeypatch):
    """The examples with `>>>`."""
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(
        module,
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
        verbose=False,
    )
    assert result.failed == 0


def shell_lines():
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def test_two_lines_do_all_the_set_up():
    """One runs the main job, one the tests; `.ci/run` takes them from here."""
    lines = [line for line in shell_lines() if "python3 -m venv" in line]
    ends = ("python -m accumkit", "python -m pytest -n 2")
    for end in ends:
        (line,) = [line for line in lines if line.endswith(end)]
        set_up, install, job = line.split(" && ")
        assert set_up == "python3 -m venv .venv"
        assert install.startswith(".venv/bin/pip install -q ")
        # `tensorflow` twice: another backend is another word in both places.
        assert line.count("tensorflow") == 2
        assert job == f"KERAS_BACKEND=tensorflow .venv/bin/{end}"
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for end in ends:
        assert f"line_of '{end}'" in script


def test_extras_named_in_the_readme_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.split("[project.optional-dependencies]")[1]
    table = table.split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    named = {
        extra
        for line in shell_lines()
        for group in re.findall(r'"\.\[([\w,]+)\]"', line)
        for extra in group.split(",")
    }
    assert {"tensorflow", "demo", "test"} <= named <= extras
    assert {"tensorflow", "jax", "torch"} <= extras


def test_files_that_the_readme_links_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    local = [link for link in links if "://" not in link]
    assert "docs/curves.png" in local
    missing = [link for link in local if not (ROOT / link).exists()]
    assert not missing


def test_version_has_an_entry_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{accumkit.__version__}] - " in changelog
    assert "\n## [Unreleased]\n" in changelog
    assert "\n### Numerics\n" in changelog
