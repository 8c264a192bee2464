"""Settings of all tests: hypothesis sets no deadlines, for a busy machine is no error."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tonnage", deadline=None)
settings.load_profile("tonnage")
