"""The records that the state of a run is made of: frozen values with pure methods."""
