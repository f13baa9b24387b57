"""What travels: boards, inbox, topics, dead letters, schemas beside the event log."""
