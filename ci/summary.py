"""`python -m ci summary FILE`: what a workflow shows of a gate's JSON or a night's run.json.

Annotations at the failing property go to stdout, as GitHub reads them; a summary ready for an issue goes to
the file that $GITHUB_STEP_SUMMARY names, else to stdout.
"""

import argparse
import inspect
import json
import os
import sys
from pathlib import Path

import properties.test_corpus  # noqa: F401 (fills the table of properties)
from ci.gate import ROOT
from properties.stations import PROPERTIES

MOST = 20
"""Findings that are told; GitHub shows ten annotations a step."""


def main(arguments: list[str]) -> int:
    """Print annotations and write the summary: 0, or 2 when the file can't be read."""
    parser = argparse.ArgumentParser("python -m ci summary", description="Annotations and summary for a workflow.")
    parser.add_argument("file", type=Path, help="what gate --json wrote, or a night's run.json")
    options = parser.parse_args(arguments)
    try:
        plain = json.loads(options.file.read_text())
        findings = plain["findings"] if "findings" in plain else plain["failures"]
        text = summary(plain, findings)
    except (OSError, ValueError, KeyError) as error:
        print(f"ci summary: {options.file}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for finding in findings[:MOST]:
        print(annotation(finding))
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with Path(target).open("a") as file:
            file.write(text)
    else:
        print(text)
    return 0


def annotation(finding: dict) -> str:
    """An error at the line of the property, in GitHub's workflow commands."""
    message = f"{finding['kind']} in {finding['kernel']} on {finding['backend']}: {finding['summary']}"
    escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    for (_, name), prop in PROPERTIES.items():
        if name == finding["property"] and prop.kernel == finding["kernel"]:
            path = Path(inspect.getsourcefile(prop.check)).relative_to(ROOT)
            return f"::error file={path},line={inspect.getsourcelines(prop.check)[1]},title={name}::{escaped}"
    return f"::error title={finding['property']}::{escaped}"


def summary(plain: dict, findings: list[dict]) -> str:
    """Markdown, ready for an issue."""
    versions = ", ".join(f"{name} {number}" for name, number in plain["versions"].items())
    lines = [
        f"## {len(findings) or 'No'} finding{'' if len(findings) == 1 else 's'}",
        "",
        f"seed {plain['seed']}; {versions}",
    ]
    for finding in findings[:MOST]:
        head = f"### {finding['kind']} in {finding['kernel']} on {finding['backend']}: {finding['property']}"
        count = f"Seen {finding['count']} times." if finding.get("count", 1) > 1 else ""
        lines += ["", head, "", f"{finding['summary']} {count}".rstrip(), "", "```sh", finding["repro"], "```"]
    if len(findings) > MOST:
        lines += ["", f"{len(findings) - MOST} more in the artifact."]
    return "\n".join(lines) + "\n"
