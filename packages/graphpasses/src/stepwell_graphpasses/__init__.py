"""A train step as one graph, and passes that make it data parallel."""
