"""What acts: stages, programs and the executor."""
