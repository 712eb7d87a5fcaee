"""`python -m ci VERB`: the verbs, each with its own --help."""

import importlib
import os
import sys

VERBS = {
    "gate": "check the kernels; exit 0 clean, 1 something was found, 2 usage or environment",
    "repro": "replay one case: a file, '-', JSON as printed in a failure, or KERNEL:SEED",
    "fuzz": "check the kernels on fresh cases for hours; writes a folder that report and repro read",
    "report": "one HTML page of a night of fuzzing",
    "summary": "GitHub annotations and a job summary of a gate's or a night's JSON",
    "mutants": "plant known faults in the kernels and see whether the gate finds them",
    "bench": "checked cases a second, and what the compiler says of each config",
}


def main(arguments: list[str]) -> int:
    """Run the verb that `arguments` start with; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m ci VERB [ARGS]\n")
        print("\n".join(f"  {verb:<8} {meaning}" for verb, meaning in VERBS.items()))
        return 0 if arguments else 2
    verb, *rest = arguments
    if verb not in VERBS:
        print(f"ci: unknown verb {verb!r}: wanted one of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracles' small products lose by threads
    os.environ["JAX_PLATFORMS"] = "cpu"  # or JAX takes the TPU, which the backend tpu leaves to one process
    return importlib.import_module(f"ci.{verb}").main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
