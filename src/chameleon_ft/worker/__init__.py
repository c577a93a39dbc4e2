"""The ranks: their layers, programs and communicators, the commit of a step, and the transfer of state."""
