"""What survives: the only package that knows LMDB.

It stores bytes and headers, and knows nothing of the core's facts. The supervisor imports it, and the core
never does.
"""
