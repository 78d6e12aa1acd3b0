"""Making a training set: reading sources, filters in restartable steps, and selection. See recipes/prepare_data.py."""
