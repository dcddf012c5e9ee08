"""The decision whether an environment is as slow as another one, from repeated measurements: pure.

The two environments are measured in turn, so that a machine that becomes slower slows both. Each pair gives the
logarithm of the ratio of their times. A sequential probability ratio test (Wald 1945) decides between two hypotheses:
the ratio is 1, or it is the `gap`. Each pair's contribution is bounded, so that no outlier decides, and the spread is
estimated from medians.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

# The smallest slow-down to look for, and the probability of a wrong decision if the noise is normal.
LEAST = 0.10
_ERROR = 1e-5
_BOUND = math.log((1 - _ERROR) / _ERROR)
# The largest contribution of a pair: at least six pairs decide.
_MOST = _BOUND / 5.5
# The least spread of a pair that is believed, of 5 % noise in each measurement: few values may look alike by chance.
_LEAST_SPREAD = 0.05 * math.sqrt(2)
# The standard deviation of a normal distribution, by the median distance of two of its values.
_SHAMOS = 1.0483


def spread_of(series: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of the log ratios within each series, by the median of all differences (Shamos)."""
    apart = [abs(one - other) for values in series for one, other in combinations(values, 2)]
    return max(_LEAST_SPREAD, _SHAMOS * statistics.median(apart)) if apart else _LEAST_SPREAD


def is_faster(ratios: Sequence[float], gap: float, spread: float) -> bool | None:
    """Return whether the log `ratios` of slow to tested times are near `gap`, and not near 0; None for more pairs."""
    steps = (gap * (ratio - gap / 2) / spread**2 for ratio in ratios)
    score = sum(max(-_MOST, min(_MOST, step)) for step in steps)
    return None if abs(score) < _BOUND else score > 0


def known_gap(ratios: Sequence[float], spread: float) -> float:
    """Return the gap that decided `ratios` show: the lower end of what their median may be."""
    return statistics.median(ratios) - 2 * math.sqrt(math.pi / 2 / len(ratios)) * spread
