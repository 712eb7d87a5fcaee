"""`python -m ci report DIR`: one HTML page of a night of fuzzing, which needs nothing but itself."""

import argparse
import base64
import io
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ci import journal
from ci.gate import ROOT
from ci.night import Night, NightError

PICTURES = 4
"""Findings that get a picture: each replays its case, some seconds."""

MOST_FINDINGS = 40
"""Findings told in full; the rest are in the folder."""

REPLAY_SECONDS = 180
TEMPLATE = "report.html.j2"


def parser() -> argparse.ArgumentParser:
    """The command line of report."""
    arguments = argparse.ArgumentParser("python -m ci report", description="One HTML page of a night of fuzzing.")
    arguments.add_argument("folder", type=Path, metavar="DIR", help="what `ci fuzz` wrote; the page is DIR/report.html")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the page's numbers here too")
    return arguments


def main(arguments: list[str]) -> int:
    """Write the page: 0, or 2 on a folder that holds no run or a missing package."""
    options = parser().parse_args(arguments)
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        print(f"ci report: needs {' and '.join(missing)}: `pip install 'ragged-oracle[report]'`", file=sys.stderr)
        return 2
    try:
        night = Night.load(options.folder)
        told = numbers(night)
        page = render(night, told)
        (night.folder / "report.html").write_text(page)
        if options.json:
            options.json.write_text(json.dumps(told, indent=1) + "\n")
    except (NightError, OSError) as error:
        print(f"ci report: {error}", file=sys.stderr)
        return 2
    print(f"{night.folder / 'report.html'}: {len(night.findings)} findings, {night.cases} cases")
    return 0


def numbers(night: Night) -> dict[str, Any]:
    """What the page says in numbers."""
    stations = [event for event in _events(night) if event["event"] == "station" and event["cases"]]
    run = json.loads((night.folder / "run.json").read_text())
    return {"schema": 1, "run": run, "rows": rows(stations), "pairs": pairs(stations)}


def _events(night: Night) -> list[dict]:
    return journal.read(night.events)[0] if night.events.exists() else []


def rows(stations: list[dict]) -> list[dict]:
    """What was run, by kernel, backend and property."""
    grouped = defaultdict(list)
    for event in stations:
        grouped[event["kernel"], event["backend"], event["property"]].append(event)
    return [
        {
            **dict(zip(("kernel", "backend", "property"), names, strict=True)),
            "configs": len({event["config"] for event in events}),
            "cases": sum(event["cases"] for event in events),
            "unsupported": sum(event["unsupported"] for event in events),
            "worst_ratio": max(event["worst_ratio"] for event in events),
        }
        for names, events in sorted(grouped.items())
    ]


def pairs(stations: list[dict]) -> list[dict]:
    """How many pairs of option values met in a config, of those whose values were met at all."""
    met = []
    for kernel in sorted({event["kernel"] for event in stations}):
        configs = [event["options"] for event in stations if event["kernel"] == kernel]
        by_options = defaultdict(list)
        for config in configs:
            by_options[tuple(config)].append(config)
        for names, alike in by_options.items():  # one kind of config each
            values = {name: {json.dumps(config[name]) for config in alike} for name in names}
            both = list(itertools.combinations(names, 2))
            seen = {(a, b, json.dumps(c[a]), json.dumps(c[b])) for c in alike for a, b in both}
            possible = sum(len(values[a]) * len(values[b]) for a, b in both)
            counts = {"options": len(names), "values": sum(map(len, values.values()))}
            met.append({"kernel": kernel, **counts, "pairs": len(seen), "possible": possible})
    return met


def render(night: Night, told: dict[str, Any]) -> str:
    """The page."""
    import jinja2

    events = _events(night)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(TEMPLATE)
    findings = sorted(night.findings.values(), key=lambda finding: -finding["count"])
    shown = [{**finding, "picture": None} for finding in findings[:MOST_FINDINGS]]
    for finding in [finding for finding in shown if finding["kind"] in ("value", "nan", "cache")][:PICTURES]:
        finding["picture"] = picture_of(finding)
    return template.render(
        run=told["run"],
        cases=night.cases,
        configs=len(night.configs),
        findings=shown,
        left_out=len(findings) - len(shown),
        rows=told["rows"],
        pairs=told["pairs"],
        pictures=[{"alt": alt, "png": png} for alt, png in charts(events)],
        harness_errors=[event["text"] for event in events if event["event"] == "error"][:5],
    )


def picture_of(finding: dict) -> str | None:
    """The picture that `repro --plot` draws, base64; None when it draws none. In a process that may die or hang."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "case.png")
        command = [sys.executable, *shlex.split(finding["repro"])[1:], "--plot", str(path)]
        try:
            subprocess.run(command, cwd=ROOT, capture_output=True, timeout=REPLAY_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return None
        return base64.b64encode(path.read_bytes()).decode() if path.exists() else None


def charts(events: list[dict]) -> list[tuple[str, str]]:
    """Alternative text and base64 PNG of each chart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for alt, draw in (("worst error / bound of each item", _ratios), ("cases a second over time", _speed)):
        figure, axes = pyplot.subplots(figsize=(6, 3.4), constrained_layout=True)
        draw(axes, [event for event in events if event["event"] == "station" and event["cases"]])
        axes.set_title(alt, fontsize=11)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        pyplot.close(figure)
        drawn.append((alt, base64.b64encode(buffer.getvalue()).decode()))
    return drawn


def _ratios(axes: Any, stations: list[dict]) -> None:
    compared = [min(event["worst_ratio"], 2.0) for event in stations if event["worst_ratio"]]
    axes.hist(compared, bins=[step / 20 for step in range(41)], color="tab:blue")
    axes.axvline(1.0, color="tab:red")
    axes.set(xlabel="error / bound, 2 and more at the right (above 1 is wrong)", ylabel="items", yscale="log")


def _speed(axes: Any, stations: list[dict]) -> None:
    if not stations:
        return
    start = min(event["time"] for event in stations)
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for event in stations:
        counts[event["backend"], int((event["time"] - start) // 60)] += event["cases"]
    for backend in sorted({name for name, _ in counts}):
        minutes = range(max(minute for _, minute in counts) + 1)
        axes.plot(minutes, [counts[backend, minute] / 60 for minute in minutes], label=backend, marker=".")
    axes.set(xlabel="minute", ylabel="cases a second")
    axes.legend()
