"""What a tensor looks like, without the tensor."""
