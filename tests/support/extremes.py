"""Numbers at the ends of what tensors hold."""

import math

INF, NAN = math.inf, math.nan
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
