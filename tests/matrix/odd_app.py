"""An agent that a client starts and stops."""

from hayata import Agent, Finish


def nothing(state, ctx):
    """Never called."""
    return {}


agent = Agent(id="odd", nodes=[nothing], decision_policy=lambda context: Finish(None))
