"""Plans of thousands of workers, as pipelines that are counted by class."""
