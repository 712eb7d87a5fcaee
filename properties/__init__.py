"""Cases, strategies, backends, subjects and verdicts; the `test_*.py` files hold the properties themselves."""
