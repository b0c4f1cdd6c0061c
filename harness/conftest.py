"""What all tests of the harness get from `harness.tests.fixtures`."""

from harness.tests.fixtures import *  # noqa: F403
