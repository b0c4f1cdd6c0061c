"""The fixtures of nsa."""

from nsa.tests.fixtures import *  # noqa: F403
