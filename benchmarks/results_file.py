"""The file with the committed results: sections replaced, the rest kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

_INTRODUCTION = """\
# Results

Written by `python -m benchmarks --write-results`. What the columns mean is
in [README.md](README.md).
"""


def updated(old: str, backend: str, sections: Mapping[str, str]) -> str:
    """The text of the file with new sections of one backend.

    Args:
        old: The text so far, or an empty one.
        backend: The heading that the sections go under.
        sections: For each workload, the text under its own heading. Those
            of workloads that weren't run stay.
    """
    introduction, parts = _split(old, "##")
    _, known = _split(parts.get(backend, ""), "###")
    known.update(sections)
    parts[backend] = "\n\n".join(
        f"### {name}\n\n{body.strip()}" for name, body in known.items()
    )
    blocks = [introduction.strip() or _INTRODUCTION.strip()]
    blocks += [f"## {name}\n\n{body.strip()}" for name, body in parts.items()]
    return "\n\n".join(blocks) + "\n"


def _split(text: str, mark: str) -> tuple[str, dict[str, str]]:
    """What stands before the first heading, and each heading's body."""
    before, *rest = re.split(rf"^{mark} (.+)$", text, flags=re.MULTILINE)
    return before, dict(zip(rest[::2], rest[1::2], strict=True))
