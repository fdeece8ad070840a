"""Searches repeat exactly in the usual run, so that a red run is red for everybody; the nightly one draws anew.

HYPOTHESIS_PROFILE=nightly for the latter.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("nightly", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
