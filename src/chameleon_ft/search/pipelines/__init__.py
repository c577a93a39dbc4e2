"""One pipeline: its stages on classes of workers, lower bounds on its time, its cuts and its schedules."""
