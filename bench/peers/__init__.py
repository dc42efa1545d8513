"""Other systems that do the same work, run with the interpreter of an environment of their own."""
