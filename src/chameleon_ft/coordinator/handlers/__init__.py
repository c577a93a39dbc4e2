"""Handlers of the state machine's events: functions on the draft of the next state."""
