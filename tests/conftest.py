"""Settings for all tests."""

import os

from hypothesis import settings

# Examples are not timed: a busy machine must not fail a property. In CI they are the same each time, so that a
# change is judged by itself; elsewhere they are new each time, so that the properties keep being explored.
settings.register_profile("envbuild", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("envbuild")
