"""Transfer of layers between ranks in a change of placement."""
