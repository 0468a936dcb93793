"""Schedules from the literature, each a pure function from sizes to a :class:`Schedule`."""
