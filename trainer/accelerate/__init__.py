"""`redline.accelerate`: a model, an optimizer and batches for the user's own training loop."""
