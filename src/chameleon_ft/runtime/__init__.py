"""What a rank runs: its layers, its program, its communicators, the commit of a step."""
