"""The compile backend: the real TPU compiler, ahead of time, on a machine without a TPU."""

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from properties.backends import BackendError
from properties.case import Inputs

BACKEND = "compile"

TARGETS: dict[str, str] = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""TPU generations compiled for, with the topology that names each to libtpu."""

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no look-up of a cloud host
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # pytest-xdist workers each load it
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


class CompileError(Exception):
    """The TPU compiler refused the kernel; the message starts with what it said."""


def require_libtpu() -> None:
    """Check that the TPU compiler is installed.

    Raises:
        BackendError: it is not.
    """
    if find_spec("libtpu") is None:
        raise BackendError("backend compile: libtpu is not installed (pip install 'ragged-oracle[compile]')")


@functools.cache
def _mesh(target: str) -> jax.sharding.Mesh:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TARGETS[target]).devices
    return jax.sharding.Mesh(np.array(devices[:1]), ("x",))


def compile_for(function: Callable, inputs: Inputs, target: str) -> jax.stages.Compiled:
    """Compile one call for `target`, a key of TARGETS; only the shapes and dtypes of `inputs` count.

    Raises:
        CompileError: tracing, lowering or compiling failed.
    """
    mesh = _mesh(target)
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shape(array: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)

    args = [shape(array) for array in inputs.args.values()]
    kwargs = {name: shape(array) for name, array in inputs.kwargs.items()}
    call = jax.jit(functools.partial(function, **inputs.options), donate_argnames=inputs.donated or None)
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return call.trace(*args, **kwargs).lower(lowering_platforms=("tpu",)).compile()
    except Exception as error:
        raise CompileError(f"{type(error).__name__}: {first_lines(error)}") from error


def first_lines(error: Any, count: int = 6) -> str:
    """The first lines of an error's message, without the compiler's pages of context."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:count])
