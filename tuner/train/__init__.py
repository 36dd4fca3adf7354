"""`redline train`: trains the winner on real data, through every change of strategy."""
