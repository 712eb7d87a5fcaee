"""pytest's side of the harness: options, seeds and settings of each item, and the report of a failure."""

import functools
import os

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracles' small products lose by threads

TIME_LIMIT = 60.0
"""Seconds a call of a kernel may take, compile included, before it counts as a hang."""

DEFAULT_BACKENDS = ("interpret", "tpu-interpret", "compile")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that `python -m ci gate` passes on."""
    group = parser.getgroup("ragged-oracle")
    group.addoption("--kernel", action="append", default=[], help="only this kernel: dense_mla or sparse_mla")
    group.addoption("--subject", action="append", default=[], metavar="KERNEL=MODULE",
                    help="check MODULE (dotted name or .py file) instead of our kernel")  # fmt: skip
    group.addoption("--backend", action="append", default=[], help="interpret, tpu-interpret, compile or tpu")
    group.addoption("--examples", type=int, default=20, help="cases a config and property (default 20)")
    group.addoption("--seed", type=int, default=0, help="seed of every draw (default 0)")
    group.addoption("--configs", type=int, metavar="N",
                    help="run N configs a family, drawn from the full product of options, not the menus")  # fmt: skip
    group.addoption("--replay", metavar="JSON", help="hold this one record instead of the regression corpus")
    group.addoption("--minimize", type=float, default=0.0, metavar="SECONDS",
                    help="search this long for a smaller case that fails as the replayed one does")  # fmt: skip
    group.addoption("--no-shrink", action="store_true", help="report the first failing case as it was found")
    group.addoption("--time-limit", type=float, default=TIME_LIMIT, help="seconds a call may take before it is a hang")
    group.addoption("--mutant", metavar="ID", help="plant this known fault in our kernel first")
    group.addoption("--deadline", type=float, metavar="UNIX", help="skip items that would start after this time")
    group.addoption("--worker-memory", type=float, metavar="GB",
                    help="what a worker may allocate: more is a crash of the kernel under test")  # fmt: skip
    group.addoption("--example-database", metavar="WHERE",
                    help="failures to replay first and to add to: a folder, redis://HOST:PORT/DB or github:OWNER/REPO "
                    "(default: .hypothesis/failures; none with --mutant or --replay)")  # fmt: skip
    group.addoption("--flight", help="folder for the cases in flight (default: a new temporary one)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options and load the subjects, before anything is collected."""
    config.addinivalue_line("markers", "differential: a property, held against kernel, backend and oracle")
    config.option.backend = config.option.backend or list(DEFAULT_BACKENDS)
    os.environ["JAX_PLATFORMS"] = "cpu"  # or JAX takes the TPU, which the backend tpu leaves to one process
    plant = None
    if config.option.mutant:
        from ci.mutants import planting

        plant = functools.partial(planting.plant, config.option.mutant)
        try:
            plant()
        except planting.MutantError as error:
            raise pytest.UsageError(str(error)) from None
    from properties import plugin, sharing

    differential = plugin.Differential(config, plant)
    config.pluginmanager.register(differential, "differential")
    if hasattr(config, "workerinput"):
        return
    hooks = sharing.of(config, differential.subjects.values(), differential.flight_folder)
    if hooks:
        config.pluginmanager.register(hooks, "sharing")
