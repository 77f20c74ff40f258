"""How many examples Hypothesis draws: as many as a test asks for, and a fifth of them in `make quick`."""

from __future__ import annotations

from hypothesis import settings

# Two busy cores are slow now and then; how long an example takes is no test of ours.
settings.register_profile("ebbflow", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=settings().max_examples // 5)


def examples(count: int) -> settings:
    """A decorator for a test that wants another number of examples than Hypothesis draws by default."""
    quick = settings.get_current_profile_name() == "quick"
    return settings(max_examples=max(5, count // 5) if quick else count)
