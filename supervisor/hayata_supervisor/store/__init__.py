"""What survives: the only package that knows LMDB. It stores bytes and headers, and does not know the core's facts."""
