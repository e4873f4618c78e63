"""A run as text, as Markdown and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from benchmarks.equality import TOLERANCE
from benchmarks.machine import sentence
from benchmarks.results import Run, SystemResult, WorkloadResult
from benchmarks.statistics import Spread, spread

TITLES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}


def title(run: Run) -> str:
    """The heading of a run: one for each backend, with and without XLA."""
    return TITLES[run.backend] + (", XLA" if run.jit else "")


def rounds(run: Run) -> str:
    """How many rounds there were."""
    return f"{run.rounds} paired round" + ("s" if run.rounds > 1 else "")


def headline(result: WorkloadResult) -> str:
    """The workload in one line."""
    item = result.workload
    return (
        f"{item.name}: {item.summary}; "
        f"{item.micro_batch} x {item.accumulation_steps}"
    )


def rows(result: WorkloadResult) -> list[list[str]]:
    """The table of one workload, its first row the heading."""
    references = result.references
    heading = ["system", "us per sample"]
    heading += [f"x {name}" for name in references]
    heading += ["peak MB", "against large"]
    table = [heading]
    for system in result.systems.values():
        if not system.measured:
            continue
        table.append(
            [
                system.name,
                _number(spread(s * 1e6 for s in system.seconds)),
                *(_ratio(result, system, name) for name in references),
                f"{system.peak / 1e6:.0f}",
                _agreement(system),
            ]
        )
    return table


def remarks(result: WorkloadResult) -> list[str]:
    """Why systems are not in the table."""
    lines = []
    for system in result.systems.values():
        if system.absent:
            lines.append(f"{system.name} was not run: {system.absent}")
        elif system.failure:
            lines.append(f"{system.name} failed: {system.failure}")
    if len({line.partition(": ")[2] for line in lines}) == 1 < len(lines):
        return [f"not run: {lines[0].partition(': ')[2]}"]
    return lines


def text(run: Run) -> str:
    """The whole run for a terminal."""
    blocks = [f"{title(run)}, {rounds(run)}\n{sentence(run.machine)}"]
    if run.quick:
        blocks.append("A quick run: its times and its memory mean nothing.")
    for result in run.workloads:
        table = rows(result)
        lines = [headline(result)]
        if len(table) > 1:
            lines += _aligned(table)
        lines += remarks(result)
        blocks.append("\n".join(lines))
    if run.wrong:
        blocks.append(
            "WRONG, failed or not within "
            f"{TOLERANCE:g} of the large batch: {', '.join(run.wrong)}"
        )
    return "\n\n".join(blocks) + "\n"


def as_json(run: Run) -> str:
    """Everything that was measured, and the ratios made of it."""
    content = asdict(run)
    for result, entry in zip(run.workloads, content["workloads"], strict=True):
        for name, found in result.systems.items():
            if found.measured:
                entry["systems"][name]["speed"] = {
                    reference: asdict(result.speed(name, reference))
                    for reference in result.references
                }
            if found.agreement:
                holds = found.agreement.holds
                entry["systems"][name]["agreement"]["holds"] = holds
    content["tolerance"] = TOLERANCE
    content["wrong"] = run.wrong
    return json.dumps(content, indent=2) + "\n"


def markdown(run: Run) -> dict[str, str]:
    """A section for each workload of the run that was measured."""
    sections = {}
    for result in run.workloads:
        table = rows(result)
        if len(table) == 1:
            continue
        lines = [
            f"{headline(result)}. {rounds(run)}. {sentence(run.machine)}.",
            "",
        ]
        heading, *body = (f"| {' | '.join(row)} |" for row in table)
        rule = "| --- |" + " ---: |" * (len(table[0]) - 1)
        lines += [heading, rule, *body]
        for line in remarks(result):
            lines += ["", line]
        sections[result.workload.name] = "\n".join(lines)
    return sections


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [
                cell.rjust(width)
                for cell, width in zip(row[1:], widths[1:], strict=True)
            ]
        )
        for row in table
    ]


def _number(values: Spread) -> str:
    return f"{values.median:.4g} ({values.low:.4g}-{values.high:.4g})"


def _ratio(result: WorkloadResult, system: SystemResult, other: str) -> str:
    if system.name == other:
        return "1"
    values = result.speed(system.name, other)
    return f"{values.median:.2f} ({values.low:.2f}-{values.high:.2f})"


def _agreement(system: SystemResult) -> str:
    found = system.agreement
    if found is None:
        return "" if system.name == "large" else "not checked"
    if not found.same_start:
        return "other start"
    verdict = "" if found.holds else " differs"
    return f"{found.difference:.1e}{verdict}"
