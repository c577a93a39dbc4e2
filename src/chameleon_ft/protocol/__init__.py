"""Control connections: messages, addresses, client and server."""
