"""Views of a run: what its records say, in the terminal, on the page, as metrics, pictures and traces."""
