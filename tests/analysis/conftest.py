"""Settings of all tests of analysis."""

from hypothesis import settings

# A busy machine must not fail a test.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
