"""Pipeline stages, schedules and the executor that runs them."""
