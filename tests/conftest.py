"""What all tests share: the rank pools and the limit on a test's time."""

pytest_plugins = ["hyperpar_core.testing.pytest_plugin"]
