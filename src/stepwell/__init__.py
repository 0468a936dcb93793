"""Pipeline and graph data parallelism for PyTorch, in layers."""
