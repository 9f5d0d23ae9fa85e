"""What surrounds the engines: the chain's own cost, start-up, compile time."""
