"""Names of the user properties in which pytest's reports carry what a station did (JUnit XML shows them too)."""

RESULT = "ragged_oracle.result"
"""A station's counts."""

FINDING = "ragged_oracle.finding"
"""Its failure."""
