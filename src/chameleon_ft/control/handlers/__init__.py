"""What the state machine does on each kind of event: functions on the draft of the next state."""
