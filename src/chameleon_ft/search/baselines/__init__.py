"""Published planners, to compare our search with: they share with it only what places, schedules and replays plans."""
