"""Settings for all tests."""

import os
import signal

from hypothesis import settings

# A script that starts the tests in the background has them ignore Ctrl-C, and so would every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are not timed: a busy machine must not fail a property. In CI they are the same each time, so that a
# change is judged by itself; elsewhere they are new each time, so that the properties keep being explored.
settings.register_profile("envbuild", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("envbuild")
