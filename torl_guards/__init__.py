"""Guards of a training run: a heartbeat that ends what stands still, and alarms for a model that collapses."""
