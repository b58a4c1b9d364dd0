"""What a run is told about settings that nobody gave, or can hardly have meant."""
