"""Pure logic: no clock, randomness, file, process or socket. Events and the time come in, effects go out.

It may import `hayata` (messages, ids, errors) and nothing else of the runtime; an import-linter contract holds it.
"""
