"""The transports that come with stepwell."""
