"""Training the small models that ship with the package; scripts/train_tiny.py runs it."""
