"""The operating system: clock, loop, channels, spawning, signals, reaping, prctl. Every process role imports it.

Nothing here knows invocations, agents or the store.
"""
