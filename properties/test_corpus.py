"""Cases that failed once, replayed by every gate before anything is drawn."""

import pytest

import properties.test_dense_mla  # these fill the table of properties
import properties.test_serving
import properties.test_sparse_mla
import properties.test_sparse_prefill  # noqa: F401
from properties import session
from properties.stations import Station


@pytest.mark.differential
def test_replayed_case(station: Station, request: pytest.FixtureRequest) -> None:
    """A recorded case passes now."""
    session.current().replay(station, request.config.option.minimize)
