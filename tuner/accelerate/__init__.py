"""`redline.accelerate`: a model, an optimizer and batches for a training loop of somebody's own."""
