"""Moving tensors between ranks over a transport that you can swap."""
