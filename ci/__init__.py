"""The verbs of the project: `python -m ci gate | repro | mutants | bench | fuzz | report`."""
