"""The degrees of rules of thumb against all even divisions there are, and against the answer."""

from __future__ import annotations

from random import Random

import pytest
from test_degree_search import NO_LIMIT, random_costs, random_shape
