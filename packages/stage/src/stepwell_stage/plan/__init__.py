"""Schedules and plans: pure data, and pure functions over it. No module below here imports torch."""
