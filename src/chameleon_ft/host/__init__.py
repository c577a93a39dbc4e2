"""The processes of each machine beside its ranks: the agent that starts and watches ranks, and the fork server."""
