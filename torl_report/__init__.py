"""What a run's folder shows: figures, the report page, behaviours in its rollouts, and regrading them."""
