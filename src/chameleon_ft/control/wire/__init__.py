"""The control connections: messages, addresses, client and server."""
