"""Pipelines on given workers: hosts, gradient sync between pipelines, local search, and the plan they make."""
