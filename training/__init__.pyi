from .training import Training as Training
