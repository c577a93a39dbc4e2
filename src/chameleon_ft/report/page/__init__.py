"""The page of a run: a web application that reads the files of its directory."""
